//! Models, weights and data sets, held against torchvision and PIL.
#![allow(clippy::unwrap_used)]

mod it {
    mod golden;
    mod python_weights;
    mod resnet;
}
