//! Plans of pipelines against PyTorch's, against a table of times, and against random damage.
#![allow(clippy::unwrap_used)]

mod it {
    mod corruptions;
    mod executor;
    mod golden;
    mod large;
    mod searched;
    mod torch_lists;
}
