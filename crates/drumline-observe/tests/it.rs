//! The page as browsers and others meet it: over HTTP, and in a real browser.
#![allow(clippy::unwrap_used)]

mod it {
    mod browser;
    mod chromium;
    mod http;
    mod looking;
    mod security;
//! What other programs make of the files.
#![allow(clippy::unwrap_used)]

mod it {
    mod tensorboard;
}
