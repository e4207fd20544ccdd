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

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap());
static SERVER: LazyLock<(Router, String)> = LazyLock::new(|| drumline_observe::page::fuzzing::server().unwrap());

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    let (_, head) = &*SERVER;
    match mode % 2 {
        0 => stranger(rest),
        _ => owner(rest, head),
    }
});

/// Without the token, whatever is said.
fn stranger(bytes: &[u8]) {
    let answers = ask(bytes);
    assert!(!has(&answers, "HTTP/1.1 200") && !has(&answers, "HTTP/1.0 200"), "let in a stranger");
    assert!(!has(&answers, "set-cookie"), "gave a stranger the cookie");
}

/// With the token, for any path.
fn owner(path: &[u8], head: &str) {
    let answers = ask(&[b"GET ", path, b" HTTP/1.1\r\n", head.as_bytes(), b"\r\n"].concat());
    assert!(!has(&answers, "HTTP/1.1 5") && !has(&answers, "HTTP/1.0 5"), "the server failed");
    let is_plain = path == b"/" || path == b"/update";
    assert!(!is_plain || answers.starts_with(b"HTTP/1.1 200"), "refused its owner");
}

fn has(answers: &[u8], text: &str) -> bool {
    answers.windows(text.len()).any(|part| part == text.as_bytes())
}

/// All that is answered on one connection.
fn ask(bytes: &[u8]) -> Vec<u8> {
    RUNTIME.block_on(async {
        let (mut client, server) = duplex(ROOM);
        let serving = tokio::spawn(axum::serve(OneConnection(Some(server)), SERVER.0.clone()).into_future());
        client.write_all(bytes).await.unwrap();
        client.shutdown().await.unwrap();
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
