//! How the data between two ranks is protected on its way.

use std::fmt;
use std::str::FromStr;

/// How links protect what they carry. The handshake proves the job's key in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum LinkSecurity {
    /// Plain TCP: anyone between two hosts can read the data and change it.
    None = 0,
    /// Each record has a number and a message authentication code (AEGIS-256X4 as a MAC): changes, replays and swaps are
    /// noticed. The data can be read on its way.
    Mac = 1,
    /// Each record is encrypted and authenticated (AEGIS-256X4), and numbered.
    Aead = 2,
}

impl LinkSecurity {
    /// The default for links between hosts. Inside a host nobody else can access the data.
    pub(crate) const BETWEEN_HOSTS: Self = Self::None;

    const ALL: [Self; 3] = [Self::None, Self::Mac, Self::Aead];

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|security| *security as u8 == code)
    }
}

impl fmt::Display for LinkSecurity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Mac => "mac",
            Self::Aead => "aead",
        })
    }
}

/// A name that is no link security.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no link security `{0}`; try none, mac or aead")]
pub struct UnknownLinkSecurity(String);

impl FromStr for LinkSecurity {
    type Err = UnknownLinkSecurity;

    fn from_str(text: &str) -> Result<Self, UnknownLinkSecurity> {
        let found = Self::ALL.into_iter().find(|security| security.to_string() == text);
        found.ok_or_else(|| UnknownLinkSecurity(text.into()))
    }
}
