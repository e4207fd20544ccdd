//! Any bytes as what a program sends to the page of `drumline watch`: a connection of its server, without a port. Nothing is
//! shown to whom it is not for, and nothing breaks.
#![no_main]

use std::future::{IntoFuture, pending};
use std::io;
use std::sync::LazyLock;

use axum::Router;
use axum::serve::Listener;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::Runtime;

/// Room for all answers to the longest input, so that neither end waits for the other.
const ROOM: usize = 4 << 20;

/// A refusal needs a few, each request behind it some more.
const TURNS: usize = 256;

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
static SERVER: LazyLock<(Router, String)> =
    LazyLock::new(|| drumline_observe::page::fuzzing::server().unwrap());

fuzz_target!(init: control(), |bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    let (_, head) = &*SERVER;
    match mode % 2 {
        0 => stranger(rest),
        _ => owner(rest, head),
    }
});

/// Whoever is let in the way strangers try is seen to be.
fn control() {
    let request = format!("GET / HTTP/1.1\r\n{}\r\n", SERVER.1);
    assert!(ask(request.as_bytes(), End::OfClient).starts_with(b"HTTP/1.1 200"), "no answer was seen");
}

/// Without the token, whatever is said.
fn stranger(bytes: &[u8]) {
    let answers = ask(bytes, End::OfClient);
    assert!(!has(&answers, "HTTP/1.1 200") && !has(&answers, "HTTP/1.0 200"), "let in a stranger");
    assert!(!has(&answers, "set-cookie"), "gave a stranger the cookie");
}

/// With the token, for any path.
fn owner(path: &[u8], head: &str) {
    if path.iter().any(|byte| *byte <= b' ') {
        return;
    }
    let request = [b"GET ", path, b" HTTP/1.1\r\nConnection: close\r\n", head.as_bytes(), b"\r\n"].concat();
    let answers = ask(&request, End::OfServer);
    assert!(answers.starts_with(b"HTTP/1.1 ") && !answers.starts_with(b"HTTP/1.1 5"), "the server failed");
    let is_plain = path == b"/" || path == b"/update";
    assert!(!is_plain || answers.starts_with(b"HTTP/1.1 200"), "refused its owner");
}

fn has(answers: &[u8], text: &str) -> bool {
    answers.windows(text.len()).any(|part| part == text.as_bytes())
}

/// Who ends a connection.
#[derive(PartialEq)]
enum End {
    OfClient,
    OfServer,
}

/// All that is answered on one connection.
fn ask(bytes: &[u8], end: End) -> Vec<u8> {
    RUNTIME.block_on(async {
        let (mut client, server) = duplex(ROOM);
        let serving = tokio::spawn(axum::serve(OneConnection(Some(server)), SERVER.0.clone()).into_future());
        client.write_all(bytes).await.unwrap();
        if end == End::OfClient {
            // Whoever hangs up gets no answer: first the server has all turns that it may need.
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
            client.shutdown().await.unwrap();
        }
        let mut answers = Vec::new();
        client.read_to_end(&mut answers).await.unwrap();
        serving.abort();
        answers
    })
}

struct OneConnection(Option<DuplexStream>);

impl Listener for OneConnection {
    type Io = DuplexStream;
    type Addr = ();

    async fn accept(&mut self) -> (DuplexStream, ()) {
        match self.0.take() {
            Some(connection) => (connection, ()),
            None => pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}
