//! A network that can be disturbed: it relays bytes between clients and a server, loses them, changes them, or resets
//! all.
//!
//! ```text
//!  client ──▶ relay ──▶ server      a *chunk* is the result of one read: with one request at a time, one frame
//!         ◀──       ◀──
//! ```

use rustix::net::sockopt::set_socket_linger;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which way a chunk goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToServer,
    ToClient,
}

/// Transforms a chunk: what is sent instead of it. Connections are numbered in order.
type Meddle = Box<dyn FnMut(usize, Way, Vec<u8>) -> Vec<u8> + Send>;

pub(crate) struct Relay {
    pub(crate) addr: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    to: SocketAddr,
    meddle: Mutex<Meddle>,
    /// Both ends of each connection.
    passed: Mutex<Vec<[TcpStream; 2]>>,
    /// Whether new connections are relayed.
    is_up: Mutex<bool>,
}

impl Relay {
    pub(crate) fn to(server: SocketAddr) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            to: server,
            meddle: Mutex::new(Box::new(|_, _, chunk| chunk)),
            passed: Mutex::default(),
            is_up: Mutex::new(true),
        });
        let inner = shared.clone();
        // Ends with the test's process.
        std::thread::spawn(move || listener.incoming().flatten().for_each(|client| inner.take(client)));
        Relay { addr, shared }
    }

    /// From now on, `meddle` transforms each chunk.
    pub(crate) fn meddle(&self, meddle: impl FnMut(usize, Way, Vec<u8>) -> Vec<u8> + Send + 'static) {
        *self.shared.meddle.lock().unwrap() = Box::new(meddle);
    }

    pub(crate) fn num_connections(&self) -> usize {
        self.shared.passed.lock().unwrap().len()
    }

    /// Resets every connection at both ends, as some firewalls do.
    pub(crate) fn reset_all(&self) {
        for [client, server] in self.shared.passed.lock().unwrap().iter() {
            for end in [client, server] {
                let _ = set_socket_linger(end, Some(Duration::ZERO));
                let _ = end.shutdown(Shutdown::Both);
            }
        }
    }

    /// Sets whether new connections are relayed, or reset at once.
    pub(crate) fn set_up(&self, is_up: bool) {
        *self.shared.is_up.lock().unwrap() = is_up;
    }
}

impl Shared {
    fn take(self: &Arc<Self>, client: TcpStream) {
        if !*self.is_up.lock().unwrap() {
            let _ = set_socket_linger(&client, Some(Duration::ZERO));
            return;
        }
        let Ok(server) = TcpStream::connect(self.to) else { return };
        let number = {
            let mut passed = self.passed.lock().unwrap();
            passed.push([client.try_clone().unwrap(), server.try_clone().unwrap()]);
            passed.len() - 1
        };
        for (from, to, way) in [
            (client.try_clone().unwrap(), server.try_clone().unwrap(), Way::ToServer),
            (server, client, Way::ToClient),
        ] {
            let shared = self.clone();
            std::thread::spawn(move || shared.pump(number, way, from, to));
        }
    }

    fn pump(&self, number: usize, way: Way, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            let chunk = (self.meddle.lock().unwrap())(number, way, buffer[..len].to_vec());
            if to.write_all(&chunk).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    }
}
