//! What the page's server answers: the files of the page, and what is new about the runs.
//!
//! | GET | answer |
//! |---|---|
//! | `/?token=…` | the cookie, and a redirect to `/` |
//! | `/` and the files it names | constants of this program |
//! | `/update?since=N` | JSON: what changed after version N |
//! | `/detail?run=N&from=A&to=B` | JSON: the curves of run N in these steps, in full resolution |
//! | `/metrics.csv?run=N` | CSV: all steps and evaluations of run N |
//!
//! Only the number of a run that the page shows reaches the file system from a request.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use serde::Deserialize;

use super::access::{Access, Entry};
use super::assets;
use super::download;
use super::watch::Watch;

/// Sent with each answer, also if a request is refused.
const HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

pub(super) type SharedWatch = Arc<Mutex<Watch>>;

/// The whole server.
pub(super) fn routes(access: Arc<Access>, watch: SharedWatch) -> Router {
    let pages = Router::new().route("/update", get(update)).route("/detail", get(detail));
    let pages = pages.route("/metrics.csv", get(csv)).fallback(get(asset)).with_state(watch);
    pages.layer(middleware::from_fn_with_state(access, admit))
}

async fn admit(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let mut response = match access.decide(request.method(), request.uri(), request.headers()) {
        Ok(Entry::Cookie) => next.run(request).await,
        Ok(Entry::Token) => ([(header::SET_COOKIE, access.cookie())], Redirect::to("/")).into_response(),
        Err(refusal) => (refusal.status(), refusal.to_string()).into_response(),
    };
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn asset(uri: Uri) -> Response {
    match assets::find(uri.path()) {
        Some(asset) => ([(header::CONTENT_TYPE, asset.kind)], asset.text).into_response(),
        None => (StatusCode::NOT_FOUND, "no such page").into_response(),
    }
}

#[derive(Deserialize)]
struct Since {
    #[serde(default)]
    since: u64,
}

/// Reads files, which may be slow on a network disk: not on the thread that answers other requests.
async fn update(State(watch): State<SharedWatch>, Query(Since { since }): Query<Since>) -> Response {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let answer = tokio::task::spawn_blocking(move || {
        watch.lock().unwrap_or_else(PoisonError::into_inner).answer(since, now)
    });
    match answer.await {
        Ok(Ok(json)) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "the runs cannot be read").into_response(),
    }
}

#[derive(Deserialize)]
struct Steps {
    run: usize,
    from: u64,
    to: u64,
}

/// Reads a file; see [`update`].
async fn detail(State(watch): State<SharedWatch>, Query(Steps { run, from, to }): Query<Steps>) -> Response {
    let Some((_, folder)) = run_of(&watch, run) else { return no_run() };
    let answer = tokio::task::spawn_blocking(move || download::detail(&folder, from..=to));
    match answer.await {
        Ok(Ok(json)) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "the run cannot be read").into_response(),
    }
}

#[derive(Deserialize)]
struct Of {
    run: usize,
}

async fn csv(State(watch): State<SharedWatch>, Query(Of { run }): Query<Of>) -> Response {
    let Some((name, folder)) = run_of(&watch, run) else { return no_run() };
    let disposition = format!("attachment; filename=\"{}.csv\"", file_name(&name));
    let headers = [
        (header::CONTENT_TYPE, "text/csv; charset=utf-8".to_owned()),
        (header::CONTENT_DISPOSITION, disposition),
    ];
    (headers, download::csv(folder)).into_response()
}

fn run_of(watch: &SharedWatch, id: usize) -> Option<(String, PathBuf)> {
    let watch = watch.lock().unwrap_or_else(PoisonError::into_inner);
    watch.run(id).map(|(name, folder)| (name.to_owned(), folder.to_owned()))
}

fn no_run() -> Response {
    (StatusCode::NOT_FOUND, "no such run").into_response()
}

/// A name that is safe in a header and in any file system.
fn file_name(name: &str) -> String {
    let safe =
        |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '-' };
    let name: String = name.trim_matches(['/', '.']).chars().map(safe).take(100).collect();
    if name.is_empty() { "run".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_plain() {
        assert_eq!(file_name("exp/a b\"\r\n.é"), "exp-a-b---.-");
        assert_eq!(file_name("../../etc"), "etc");
        assert_eq!(file_name("//"), "run");
    }
}
