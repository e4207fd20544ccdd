//! Why an image cannot be transformed.

/// An image that a [`Transform`](super::Transform) cannot be applied to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransformError {
    /// The image has no pixels.
    #[error("the image is empty")]
    Empty,
    /// The image is smaller than the crop, even with its border.
    #[error(
        "the image is {width}×{height}, with a border of {padding} too small for a crop of {size}; \
         try a smaller IM_SIZE"
    )]
    TooSmall {
        /// The width of the image.
        width: usize,
        /// The height of the image.
        height: usize,
        /// The width of the border.
        padding: usize,
        /// The side of the crop.
        size: usize,
    },
    /// The image must be resized, which only the CPU does, but its batches are made on a device.
    #[error("the image must be resized, which is done on the CPU")]
    NeedsResize,
    /// The image cannot be resized.
    #[error("cannot resize the image: {0}")]
    Resize(Box<dyn std::error::Error + Send + Sync>),
}
