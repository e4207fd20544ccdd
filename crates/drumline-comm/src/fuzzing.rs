//! Entry points for the fuzzer to code behind the handshake: headers of frames, names of links, messages.

use crate::tcp::frame::{DataHeader, HEADER, MailHeader};
use crate::tcp::{LinkNote, LinkSecurity, opens_any};

pub use crate::group::fuzzing::messages;

/// Decodes any bytes as headers. What is accepted must survive a round trip.
pub fn headers(bytes: &[u8]) {
    let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else { return };
    if let Ok(data) = DataHeader::decode(header) {
        assert_eq!(data.encode(), *header);
    }
    if let Ok(mail) = MailHeader::decode(header) {
        assert_eq!(MailHeader::decode(&mail.encode()), Ok(mail));
        assert_eq!(mail.bytes() % mail.dtype.size() as u64, 0);
    }
}

/// Decodes any bytes as the note with which a link is made.
pub fn link_name(bytes: &[u8]) {
    if let Some(note) = LinkNote::decode(bytes) {
        assert_eq!(note.encode(), bytes);
    }
}

/// Feeds any bytes to a protected link, in pieces of any size. Without the key no record may be accepted.
pub fn records(bytes: &[u8]) {
    let Some((&[mode, piece], sent)) = bytes.split_first_chunk::<2>() else { return };
    let security = if mode % 2 == 0 { LinkSecurity::Mac } else { LinkSecurity::Aead };
    assert!(
        !opens_any(security, sent.chunks(usize::from(piece) + 1)),
        "a record that was made without the key was accepted"
    );
}
