//! Zoo.
