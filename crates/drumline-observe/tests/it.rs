//! The files and the page as others see them: TensorBoard, programs that send HTTP requests, a real browser.
#![allow(clippy::unwrap_used)]

mod it {
    mod browser;
    mod chromium;
    mod http;
    mod looking;
    mod security;
    mod tensorboard;
}
