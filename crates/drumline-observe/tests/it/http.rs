//! An HTTP client that can send any request head, even one that no browser would send.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::time::Duration;

use drumline_observe::page::{Page, Runs, Serving};

const LONGEST: Duration = Duration::from_secs(20);

/// A page that is being served, and the parts of its address.
pub(super) struct Opened {
    pub(super) url: String,
    pub(super) port: u16,
    pub(super) token: String,
    _serving: Serving,
}

impl Opened {
    pub(super) fn new(folders: &[&Path]) -> Self {
        let runs = Runs::Folders(folders.iter().map(|folder| folder.to_path_buf()).collect());
        let page = Page::bind(0, runs).unwrap();
        let url = page.url();
        let (address, token) = url.split_once("/?token=").unwrap();
        let port = address.rsplit_once(':').unwrap().1.parse().unwrap();
        let token = token.to_owned();
        Self { port, token, _serving: page.start().unwrap(), url }
    }

    pub(super) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(super) fn cookie(&self) -> String {
        format!("drumline-{}={}", self.port, self.token)
    }

    /// Sends a request with the cookie, as a browser would.
    pub(super) fn get(&self, path: &str) -> Reply {
        self.ask("GET", path, &[("Host", &self.host()), ("Cookie", &self.cookie())])
    }

    pub(super) fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Reply {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        stream.set_read_timeout(Some(LONGEST)).unwrap();
        let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let head = format!("{method} {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut text = Vec::new();
        stream.read_to_end(&mut text).unwrap();
        Reply::of(&String::from_utf8(text).unwrap())
    }
}

/// A response.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    head: String,
    pub(super) body: String,
}

impl Reply {
    fn of(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).unwrap_or("0").parse().unwrap();
        Self { status, head: head.to_owned(), body: body.to_owned() }
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}
