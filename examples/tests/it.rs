//! The examples as a student runs them.
#![allow(clippy::unwrap_used)]

mod it {
    mod collectives;
    mod launch_try;
    mod spawn;
}
