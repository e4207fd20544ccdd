//! What other programs make of the files.
#![allow(clippy::unwrap_used)]

mod it {
    mod tensorboard;
}
