//! Connections of browsers, and of anything else that finds the port: a limited number, and none that stays silent.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections at a time. More wait until one ends.
const MOST: usize = 64;

/// How long the head of a request may take, and a connection may be idle before its next.
const HEAD: Duration = Duration::from_secs(5);

/// How long to wait if the system has no free descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until it is dropped.
pub(super) async fn serve(listener: TcpListener, routes: Router) {
    let places = Arc::new(Semaphore::new(MOST));
    // The semaphore is never closed.
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let service = TowerToHyperService::new(routes.clone());
        tokio::spawn(async move {
            let mut connection = http1::Builder::new();
            let connection = connection.timer(TokioTimer::new()).header_read_timeout(HEAD);
            // A browser may leave in the middle of an answer.
            let _ = connection.serve_connection(TokioIo::new(stream), service).await;
            drop(place);
        });
    }
}
