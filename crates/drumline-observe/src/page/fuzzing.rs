//! The fuzzer's entry point to the page's server, without a port.

use std::sync::{Arc, Mutex};

use super::PageError;
use super::access::Access;
use super::watch::{Runs, Watch};

/// The server of a page without runs, and the header lines that are accepted.
pub fn server() -> Result<(axum::Router, String), PageError> {
    let access = Access::new(6116).map_err(PageError::Token)?;
    let head = format!("Host: 127.0.0.1:6116\r\nCookie: {}\r\n", access.cookie());
    let watch = Watch::new(Runs::Folders(Vec::new()));
    Ok((super::routes::routes(Arc::new(access), Arc::new(Mutex::new(watch))), head))
}
