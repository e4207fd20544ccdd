//! Only the owner can read the page. Each test of a refused request also sends one that is allowed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use drumline_observe::fake::FakeRun;
use drumline_observe::page::{Page, PageError, Runs};
use serde_json::Value;
use tempfile::TempDir;

use super::http::Opened;

fn opened() -> (TempDir, Opened) {
    let folder = tempfile::tempdir().unwrap();
    let mut run = FakeRun::create(folder.path(), 2).unwrap();
    (0..10).for_each(|_| run.step().unwrap());
    run.write_ranks(1.0).unwrap();
    let page = Opened::new(&[folder.path()]);
    (folder, page)
}

#[test]
fn the_printed_address_sets_a_cookie_and_the_cookie_opens_the_page() {
    let (_folder, page) = opened();
    let first = page.ask("GET", &format!("/?token={}", page.token), &[("Host", &page.host())]);
    assert_eq!((first.status, first.header("location")), (303, Some("/")));
    let cookie = first.header("set-cookie").unwrap();
    assert!(
        cookie.starts_with(&page.cookie()) && cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"),
        "{cookie}"
    );
    assert_eq!(page.token.len(), 64);
    for path in [
        "/",
        "/page.js",
        "/page.css",
        "/icon.svg",
        "/update",
        "/update?since=0",
        "/metrics.csv?run=0",
        "/detail?run=0&from=1&to=2",
    ] {
        assert_eq!(page.get(path).status, 200, "{path}");
    }
}

#[test]
fn a_silent_connection_is_closed_and_delays_nobody() {
    let (_folder, page) = opened();
    let silent: Vec<_> = (0..70)
        .map(|number| {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, page.port)).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            // Some have sent a part of a request.
            if number % 2 == 0 {
                stream.write_all(b"GET / HTTP/1.1\r\nHost: ").unwrap();
            }
            stream
        })
        .collect();
    let begin = Instant::now();
    assert_eq!(page.get("/").status, 200, "later connections get an answer");
    for mut stream in silent.into_iter().take(64) {
        // The connection is closed, with or without a reason.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert!(begin.elapsed() < Duration::from_secs(25), "{:?}", begin.elapsed());
}

#[test]
fn every_answer_forbids_scripts_from_elsewhere() {
    let (_folder, page) = opened();
    let refused = page.ask("GET", "/", &[("Host", "evil.example")]);
    page.get("/update");
    let csv = page.get("/metrics.csv?run=0");
    assert_eq!(csv.header("content-type"), Some("text/csv; charset=utf-8"));
    assert!(csv.header("content-disposition").unwrap().starts_with("attachment; filename="));
    for reply in [page.get("/"), page.get("/update"), page.get("/none"), csv, refused] {
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'self';") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(reply.header("x-frame-options"), Some("DENY"));
        assert_eq!(reply.header("cache-control"), Some("no-store"));
        assert_eq!(reply.header("referrer-policy"), Some("no-referrer"));
        assert!(reply.header("access-control-allow-origin").is_none());
    }
}

#[test]
fn downloads_need_the_cookie_and_a_run_that_is_shown() {
    let (_folder, page) = opened();
    page.get("/update");
    let table = page.get("/metrics.csv?run=0").body;
    assert!(table.contains("kind,step,epoch,time,samples,loss,lr,samples_per_s,acc1"), "{table}");
    for path in ["/metrics.csv?run=0", "/detail?run=0&from=1&to=2"] {
        let reply = page.ask("GET", path, &[("Host", &page.host())]);
        assert_eq!(reply.status, 403, "{path} without the cookie");
        assert!(!reply.body.contains("loss"), "{path}");
    }
    for path in ["/metrics.csv?run=1", "/metrics.csv?run=99999999999", "/detail?run=7&from=0&to=1"] {
        assert_eq!(page.get(path).status, 404, "{path}");
    }
    for path in ["/metrics.csv", "/metrics.csv?run=../../etc/passwd", "/metrics.csv?run=-1", "/detail?run=0"]
    {
        assert_eq!(page.get(path).status, 400, "{path}");
    }
}

#[test]
fn a_foreign_host_name_is_refused_even_if_it_resolves_to_this_machine() {
    let (_folder, page) = opened();
    let port = page.port;
    let foreign =
        [format!("evil.example:{port}"), format!("127.0.0.1.evil.example:{port}"), "127.0.0.1".to_owned()];
    for host in foreign {
        let reply = page.ask("GET", "/update", &[("Host", &host), ("Cookie", &page.cookie())]);
        assert_eq!(reply.status, 403, "{host}");
        // Nor with the token, for a name that was redirected to this machine (DNS rebinding).
        let reply = page.ask("GET", &format!("/?token={}", page.token), &[("Host", &host)]);
        assert_eq!((reply.status, reply.header("set-cookie")), (403, None), "{host}");
    }
    let absolute = format!("http://evil.example:{port}/update");
    assert_eq!(page.get(&absolute).status, 403);
    let by_name = format!("localhost:{port}");
    assert_eq!(page.ask("GET", "/update", &[("Host", &by_name), ("Cookie", &page.cookie())]).status, 200);
}

#[test]
fn a_foreign_origin_is_refused() {
    let (_folder, page) = opened();
    let with = |origin: &str| {
        page.ask("GET", "/update", &[("Host", &page.host()), ("Cookie", &page.cookie()), ("Origin", origin)])
            .status
    };
    for origin in ["null", "http://evil.example", "https://127.0.0.1", "file://", "http://127.0.0.1:1"] {
        assert_eq!(with(origin), 403, "{origin}");
    }
    assert_eq!(with(&format!("http://{}", page.host())), 200);
}

#[test]
fn without_the_token_every_path_is_refused() {
    let (_folder, page) = opened();
    let (host, other) = (page.host(), "0".repeat(64));
    let wrong = format!("drumline-{}={other}", page.port);
    for path in ["/", "/update", "/page.js", "/none", &format!("/?token={other}"), "/?token="] {
        assert_eq!(page.ask("GET", path, &[("Host", &host)]).status, 403, "{path}");
        assert_eq!(page.ask("GET", path, &[("Host", &host), ("Cookie", &wrong)]).status, 403, "{path}");
    }
    assert_eq!(page.get("/update").status, 200);
}

#[test]
fn paths_do_not_lead_to_files() {
    let (folder, page) = opened();
    let secret = folder.path().parent().unwrap().join("etc");
    let paths = [
        "/../../../etc/passwd".to_owned(),
        "/%2e%2e/%2e%2e/etc/passwd".to_owned(),
        "/..%2f..%2fetc%2fpasswd".to_owned(),
        "//etc/passwd".to_owned(),
        "/./page.js".to_owned(),
        "/assets/page.js".to_owned(),
        "/metrics.jsonl".to_owned(),
        secret.display().to_string(),
        folder.path().join("metrics.jsonl").display().to_string(),
    ];
    for path in paths {
        let reply = page.get(&path);
        assert_eq!((reply.status, reply.body.as_str()), (404, "no such page"), "{path}");
    }
    for query in ["/update?since=../x", "/update?since=-1", "/update?since=99999999999999999999999"] {
        assert_eq!(page.get(query).status, 400, "{query}");
    }
    assert_eq!(page.get("/update?since=7&folder=/etc").status, 200);
    assert_eq!(page.get("/page.js").status, 200);
}

#[test]
fn only_reads_are_allowed_and_they_change_nothing() {
    let (folder, page) = opened();
    let before = snapshot(folder.path());
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "KILL"] {
        for path in ["/", "/update", "/kill"] {
            let head = [("Host", &*page.host()), ("Cookie", &page.cookie()), ("Content-Length", "0")];
            let reply = page.ask(method, path, &head);
            assert!([400, 405].contains(&reply.status), "{method} {path}: {reply:?}");
        }
    }
    for path in ["/", "/update", "/kill", "/update?kill=1"] {
        let reply = page.get(path);
        assert_eq!(reply.status, if path == "/kill" { 404 } else { 200 }, "{path}");
    }
    let head = page.ask("HEAD", "/update", &[("Host", &page.host()), ("Cookie", &page.cookie())]);
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert_eq!(snapshot(folder.path()), before);
    // The control: a write is noticed.
    fs::write(folder.path().join("ranks/00000.json"), "{}").unwrap();
    assert_ne!(snapshot(folder.path()), before);
}

#[test]
fn hostile_names_are_sent_as_strings() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("<script>hurt()<_script>");
    let hostile = "</script><img src=x onerror=hurt()>\"'`";
    let mut run = FakeRun::create(&folder, 1).unwrap();
    run.host = hostile.to_owned();
    run.metric = hostile.to_owned();
    run.say(hostile).unwrap();
    run.step().unwrap();
    run.write_ranks(1.0).unwrap();
    let reply = Opened::new(&[&folder]).get("/update");
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let answer: Value = serde_json::from_str(&reply.body).unwrap();
    let run = &answer["runs"][0];
    assert_eq!(run["name"], "<script>hurt()<_script>");
    assert_eq!((&run["ranks"][0]["host"], &run["log"]["lines"][1]), (&hostile.into(), &hostile.into()));
    assert!(run["curves"].as_array().unwrap().iter().any(|curve| curve["name"] == hostile));
}

#[test]
fn only_this_machine_can_reach_it() {
    let (_folder, page) = opened();
    let listening = |table: &str| {
        let text = fs::read_to_string(table).unwrap_or_default();
        let port = format!(":{:04X}", page.port);
        let rows = text.lines().filter_map(|line| line.split_whitespace().nth(1));
        rows.filter(|local| local.ends_with(&port)).map(str::to_owned).collect::<Vec<_>>()
    };
    let addresses = listening("/proc/net/tcp");
    assert!(
        !addresses.is_empty() && addresses.iter().all(|local| local.starts_with("0100007F:")),
        "{addresses:?}"
    );
    assert_eq!(listening("/proc/net/tcp6"), Vec::<String>::new());
}

#[test]
fn a_taken_port_is_skipped_and_a_missing_folder_is_waited_for() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let page = Page::bind(port, Runs::Running).unwrap();
    assert!(page.port() > port && page.url().contains(&format!(":{}/", page.port())), "{}", page.url());
    drop((taken, page));
    assert_eq!(Page::bind(port, Runs::Running).unwrap().port(), port, "control: the requested port");
    assert!(Page::bind(0, Runs::Folders(vec!["/nowhere/run".into()])).is_ok());
    // A file cannot become a folder.
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Page::bind(0, Runs::Folders(vec![file.path().to_owned()])).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, PageError::Folder { .. }) && text.contains("; try the OUT_DIR"), "{text}");
}

/// The bytes and the modification time of each file.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(snapshot(&path));
        } else {
            let modified = fs::metadata(&path).unwrap().modified().unwrap();
            files.insert(path.clone(), (fs::read(path).unwrap(), modified));
        }
    }
    files
}
