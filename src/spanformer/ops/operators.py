"""Registers every torch operator of spanformer. Import it in a process that loads an exported program: torch finds an
operator only after Python has registered it."""

import spanformer.ops.backends.native
import spanformer.ops.backends.triton.operator
import spanformer.ops.decode.operator
import spanformer.ops.linear.matrix_native  # noqa: F401
