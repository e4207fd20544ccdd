//! The libtorch side.
