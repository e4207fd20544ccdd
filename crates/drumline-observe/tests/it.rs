//! What others make of the files and of the page: TensorBoard, programs that ask over HTTP, a real browser.
#![allow(clippy::unwrap_used)]

mod it {
    mod browser;
    mod chromium;
    mod http;
    mod looking;
    mod security;
    mod tensorboard;
}
