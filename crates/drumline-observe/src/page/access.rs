//! Who may see the page: decided from the head of a request alone, before anything else is done.
//!
//! ```text
//!   Host one of ours? ─▶ Origin ours, or none? ─▶ GET or HEAD? ─▶ cookie, or the token of the printed address?
//!   else 403             else 403                 else 405        else 403
//! ```
//!
//! The Host check stops foreign names that point to 127.0.0.1, the Origin check scripts of other sites, and the token other
//! users of this machine. No request changes anything, so only reading needs protection.

use axum::http::header::{COOKIE, HOST, ORIGIN};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use subtle::ConstantTimeEq;

/// The scheme's own port, which browsers leave out.
const HTTP: u16 = 80;

/// What a request must have.
#[derive(Debug)]
pub(super) struct Access {
    hosts: [String; 2],
    port: u16,
    token: String,
}

/// How a request is authorised.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// By the token of the printed address. The answer sets the cookie.
    Token,
    Cookie,
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("this page has another address; try the one that drumline watch printed")]
    Host,
    #[error("this page is not for other sites")]
    Origin,
    #[error("this page can only be read")]
    Method,
    #[error("no token; try the whole address that drumline watch printed")]
    Token,
}

impl Refusal {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Host | Self::Origin | Self::Token => StatusCode::FORBIDDEN,
        }
    }
}

impl Access {
    pub(super) fn new(port: u16) -> Result<Self, getrandom::Error> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret)?;
        let token = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let hosts = ["127.0.0.1", "localhost"];
        let hosts = hosts.map(|name| if port == HTTP { name.to_owned() } else { format!("{name}:{port}") });
        Ok(Self { hosts, port, token })
    }

    /// The address to open.
    pub(super) fn url(&self) -> String {
        format!("http://{}/?token={}", self.hosts[0], self.token)
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// The cookie that a browser keeps instead of the token. Cookies are shared between ports, so the name contains the port.
    pub(super) fn cookie(&self) -> String {
        format!("{}={}; Path=/; HttpOnly; SameSite=Strict", self.cookie_name(), self.token)
    }

    pub(super) fn decide(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Entry, Refusal> {
        let is_ours = |host: &str| self.hosts.iter().any(|ours| ours == host);
        let names = || headers.get_all(HOST).iter();
        if names().count() != 1 || !names().all(|host| host.to_str().is_ok_and(is_ours)) {
            return Err(Refusal::Host);
        }
        if uri.authority().is_some_and(|authority| !is_ours(authority.as_str())) {
            return Err(Refusal::Host);
        }
        let is_our_origin = |origin: &str| origin.strip_prefix("http://").is_some_and(is_ours);
        if !headers.get_all(ORIGIN).iter().all(|origin| origin.to_str().is_ok_and(is_our_origin)) {
            return Err(Refusal::Origin);
        }
        if !matches!(*method, Method::GET | Method::HEAD) {
            return Err(Refusal::Method);
        }
        if cookies(headers).any(|(name, value)| name == self.cookie_name() && self.is_token(value)) {
            return Ok(Entry::Cookie);
        }
        let given = uri.query().and_then(|query| query.strip_prefix("token="));
        if uri.path() == "/" && given.is_some_and(|given| self.is_token(given)) {
            return Ok(Entry::Token);
        }
        Err(Refusal::Token)
    }

    fn cookie_name(&self) -> String {
        format!("drumline-{}", self.port)
    }

    /// Compares in constant time.
    fn is_token(&self, given: &str) -> bool {
        self.token.as_bytes().ct_eq(given.as_bytes()).into()
    }
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let lines = headers.get_all(COOKIE).iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(';')).filter_map(|cookie| cookie.trim().split_once('='))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use proptest::prelude::*;

    fn decide(access: &Access, uri: &str, headers: &[(&'static str, String)]) -> Result<Entry, Refusal> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_str(value).unwrap());
        }
        access.decide(&Method::GET, &uri.parse().unwrap(), &map)
    }

    fn host() -> (&'static str, String) {
        ("host", "127.0.0.1:6116".to_owned())
    }

    #[test]
    fn the_printed_address_and_then_the_cookie_are_accepted() {
        let access = Access::new(6116).unwrap();
        let path = access.url().strip_prefix("http://127.0.0.1:6116").unwrap().to_owned();
        assert_eq!(decide(&access, &path, &[host()]), Ok(Entry::Token));
        let cookie = ("cookie", format!("other=1; {}", access.cookie()));
        assert_eq!(decide(&access, "/update", &[host(), cookie.clone()]), Ok(Entry::Cookie));
        let by_name = ("host", "localhost:6116".to_owned());
        let origin = ("origin", "http://localhost:6116".to_owned());
        assert_eq!(decide(&access, "/", &[by_name, origin, cookie]), Ok(Entry::Cookie));
    }

    #[test]
    fn each_wrong_head_is_refused_though_the_cookie_is_right() {
        let access = Access::new(6116).unwrap();
        let cookie = ("cookie", access.cookie());
        let hosts = [
            "evil.example:6116",
            "127.0.0.1",
            "127.0.0.1:80",
            "127.0.0.1:6116.evil.example",
            "LOCALHOST.:6116",
            "",
        ];
        for name in hosts {
            let head = [("host", name.to_owned()), cookie.clone()];
            assert_eq!(decide(&access, "/", &head), Err(Refusal::Host), "{name}");
        }
        assert_eq!(decide(&access, "/", std::slice::from_ref(&cookie)), Err(Refusal::Host));
        assert_eq!(decide(&access, "/", &[host(), host(), cookie.clone()]), Err(Refusal::Host));
        assert_eq!(decide(&access, "http://evil.example/", &[host(), cookie.clone()]), Err(Refusal::Host));
        for origin in ["null", "http://evil.example", "https://127.0.0.1:6116", "http://127.0.0.1:1", ""] {
            let head = [host(), cookie.clone(), ("origin", origin.to_owned())];
            assert_eq!(decide(&access, "/", &head), Err(Refusal::Origin), "{origin}");
        }
    }

    #[test]
    fn the_token_opens_the_page_itself_only() {
        let access = Access::new(6116).unwrap();
        let token = access.url().split_once('=').unwrap().1.to_owned();
        for path in
            [format!("/update?token={token}"), format!("/?token={token}&x=1"), format!("/?a=1&token={token}")]
        {
            assert_eq!(decide(&access, &path, &[host()]), Err(Refusal::Token), "{path}");
        }
        let other = ("cookie", Access::new(6116).unwrap().cookie());
        assert_eq!(decide(&access, "/", &[host(), other]), Err(Refusal::Token));
        let of_another_port = ("cookie", format!("drumline-1={token}"));
        assert_eq!(decide(&access, "/", &[host(), of_another_port]), Err(Refusal::Token));
    }

    #[test]
    fn the_schemes_own_port_is_left_out() {
        let access = Access::new(80).unwrap();
        assert!(access.url().starts_with("http://127.0.0.1/?token="));
        let cookie = ("cookie", access.cookie());
        assert_eq!(decide(&access, "/", &[("host", "localhost".to_owned()), cookie]), Ok(Entry::Cookie));
    }

    proptest! {
        #[test]
        fn no_random_request_is_accepted(path in "/[a-z?=&%.;/]{0,40}", cookie in "[ -~]{0,80}", host in "[ -~]{0,30}") {
            let access = Access::new(6116).unwrap();
            prop_assume!(path.parse::<Uri>().is_ok());
            let ours = ("host", "127.0.0.1:6116".to_owned());
            prop_assert!(decide(&access, &path, &[ours, ("cookie", cookie)]).is_err());
            prop_assert!(decide(&access, "/", &[("host", host), ("cookie", access.cookie())]).is_err());
        }
    }
}
