"""`python -m spanformer`, and with it `torchrun -m spanformer`."""

from spanformer.cli.main import main

if __name__ == "__main__":
    main()
