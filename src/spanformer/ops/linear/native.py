"""Linear attention by the compiled CPU kernel."""


def unusable() -> list[str]:
    return ["not built yet"]
