//! The messages between a store's client and its server: a fixed binary schema, sealed in frames.
//!
//! ```text
//!  ┌──────────┬───────────┬─────────┬───────────────────────────┬────────┐
//!  │ length 4 │ counter 8 │ check 8 │ message: id 8 kind 1 body │ tag 16 │    little endian; length is the message's
//!  └──────────┴───────────┴─────────┴───────────────────────────┴────────┘
//!   `envelope`: sender and order          in a body: bytes = length 4 + bytes, list = count 4 + items
//! ```
//! A client numbers its requests. The number stays the same when a request is sent again over another connection, so
//! that the server carries it out once. A call also names the *oldest* request that still waits for its reply: the
//! server forgets the replies before that. A reply has the number of its request, and each request gets exactly one
//! reply. `Cancel` and `Bye` get none. If a server closes a connection because of what it received, it says why in a
//! `Failed` reply with number 0.
//!
//! Lengths are checked before anything is allocated or waited for. Not here: reading and writing sockets.

mod envelope;

pub use envelope::{FRAME_OVERHEAD, Opener, Sealer};

use crate::store::request::{MAX_KEY, MAX_VALUE, Reply, Request};

/// Longest message: the values of one request, a key, and room for the lengths.
pub const MAX_FRAME: usize = MAX_VALUE + 2 * MAX_KEY;
/// Shortest message: a number and a kind.
const LEAST: usize = 8 + 1;

/// Why bytes are not a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Length field out of range.
    #[error("a frame has {LEAST} to {MAX_FRAME} bytes, got a length of {length}")]
    Length {
        /// The value of the field.
        length: u32,
    },
    /// The MAC does not fit the key of this connection.
    #[error(
        "frame {expected} of this connection was changed on the way, or comes from another connection: its MAC is wrong"
    )]
    Changed {
        /// The number that was due.
        expected: u64,
    },
    /// The frame numbers are not consecutive.
    #[error(
        "expected frame {expected} of this connection, got frame {got}: frames were repeated, dropped or reordered on the way"
    )]
    Order {
        /// The number that was due.
        expected: u64,
        /// The number that was received.
        got: u64,
    },
    /// The kind is unknown.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// The body ends inside a field.
    #[error("the frame ends inside a field")]
    Short,
    /// Bytes after the last field.
    #[error("{0} bytes after the last field")]
    Long(usize),
    /// A key is too long.
    #[error("a key may have {MAX_KEY} bytes, got {0}")]
    Key(usize),
    /// A key is not UTF-8.
    #[error("a key is not UTF-8")]
    Text,
}

/// What a client sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A request, to be answered.
    Request(Request),
    /// Cancel the wait with this number. The wait is answered with `Cancelled`, unless it was answered before.
    Cancel(u64),
    /// This member leaves regularly.
    Bye,
    /// Checks whether the server is alive. Answered with `Done`.
    Ping,
}

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The number of the request.
    pub id: u64,
    kind: u8,
    body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Reads the number and the kind of a message.
    pub fn read(message: &'a [u8]) -> Result<Frame<'a>, FrameError> {
        let mut fields = Fields(message);
        let id = fields.u64()?;
        let kind = fields.u8()?;
        Ok(Frame { id, kind, body: fields.0 })
    }

    /// Decodes a client's message: the oldest request without a reply, and the call.
    pub fn call(&self) -> Result<(u64, Call), FrameError> {
        let mut body = Fields(self.body);
        let oldest = body.u64()?;
        let call = match self.kind {
            1 => Call::Request(Request::Set { key: body.key()?, value: body.bytes()? }),
            2 => Call::Request(Request::Get { key: body.key()? }),
            3 => Call::Request(Request::Wait { keys: body.list(Fields::key)? }),
            4 => Call::Request(Request::Add { key: body.key()?, delta: body.u64()? as i64 }),
            5 => Call::Request(Request::CompareSet {
                key: body.key()?,
                expected: body.list(Fields::bytes)?.pop(),
                desired: body.bytes()?,
            }),
            6 => Call::Request(Request::Append { key: body.key()?, value: body.bytes()? }),
            7 => Call::Request(Request::Tail { key: body.key()?, from: body.u64()? }),
            8 => Call::Request(Request::Delete { key: body.key()? }),
            9 => Call::Request(Request::NumKeys),
            10 => Call::Request(Request::List { prefix: body.key()? }),
            11 => Call::Request(Request::MultiGet { keys: body.list(Fields::key)? }),
            12 => Call::Request(Request::MultiSet { pairs: body.list(|b| Ok((b.key()?, b.bytes()?)))? }),
            13 => Call::Cancel(body.u64()?),
            14 => Call::Bye,
            15 => Call::Ping,
            kind => return Err(FrameError::Kind(kind)),
        };
        body.end((oldest, call))
    }

    /// Decodes a server's message.
    pub fn reply(&self) -> Result<Reply, FrameError> {
        let mut body = Fields(self.body);
        let reply = match self.kind {
            128 => Reply::Done,
            129 => Reply::Bytes(body.bytes()?),
            130 => Reply::Number(body.u64()? as i64),
            131 => Reply::Count(body.u64()?),
            132 => Reply::Flag(body.u8()? != 0),
            133 => Reply::Names(body.list(Fields::key)?),
            134 => Reply::Values(body.list(Fields::bytes)?),
            135 => Reply::Cancelled,
            136 => Reply::Failed(String::from_utf8_lossy(&body.bytes()?).into_owned()),
            kind => return Err(FrameError::Kind(kind)),
        };
        body.end(reply)
    }
}

/// Appends a client's message to `out`; `oldest` is the oldest request that has no reply yet.
pub fn encode_call(id: u64, oldest: u64, call: &Call, out: &mut Vec<u8>) {
    let kind = match call {
        Call::Request(request) => kind_of(request),
        Call::Cancel(_) => 13,
        Call::Bye => 14,
        Call::Ping => 15,
    };
    head(id, kind, out);
    number(out, oldest);
    match call {
        Call::Request(request) => encode_request(request, out),
        Call::Cancel(target) => number(out, *target),
        Call::Bye | Call::Ping => {}
    }
}

fn kind_of(request: &Request) -> u8 {
    match request {
        Request::Set { .. } => 1,
        Request::Get { .. } => 2,
        Request::Wait { .. } => 3,
        Request::Add { .. } => 4,
        Request::CompareSet { .. } => 5,
        Request::Append { .. } => 6,
        Request::Tail { .. } => 7,
        Request::Delete { .. } => 8,
        Request::NumKeys => 9,
        Request::List { .. } => 10,
        Request::MultiGet { .. } => 11,
        Request::MultiSet { .. } => 12,
    }
}

fn encode_request(request: &Request, out: &mut Vec<u8>) {
    match request {
        Request::Set { key, value } | Request::Append { key, value } => key_value(out, key, value),
        Request::Get { key } | Request::Delete { key } => bytes(out, key.as_bytes()),
        Request::Wait { keys } | Request::MultiGet { keys } => list(out, keys),
        Request::Add { key, delta } => key_number(out, key, *delta as u64),
        Request::CompareSet { key, expected, desired } => {
            bytes(out, key.as_bytes());
            list(out, expected.as_slice());
            bytes(out, desired);
        }
        Request::Tail { key, from } => key_number(out, key, *from),
        Request::NumKeys => {}
        Request::List { prefix } => bytes(out, prefix.as_bytes()),
        Request::MultiSet { pairs } => {
            out.extend((pairs.len() as u32).to_le_bytes());
            pairs.iter().for_each(|(key, value)| key_value(out, key, value));
        }
    }
}

/// Appends a server's message to `out`.
pub fn encode_reply(id: u64, reply: &Reply, out: &mut Vec<u8>) {
    let kind = match reply {
        Reply::Done => 128,
        Reply::Bytes(_) => 129,
        Reply::Number(_) => 130,
        Reply::Count(_) => 131,
        Reply::Flag(_) => 132,
        Reply::Names(_) => 133,
        Reply::Values(_) => 134,
        Reply::Cancelled => 135,
        Reply::Failed(_) => 136,
    };
    head(id, kind, out);
    match reply {
        Reply::Done | Reply::Cancelled => {}
        Reply::Bytes(value) => bytes(out, value),
        Reply::Number(value) => number(out, *value as u64),
        Reply::Count(count) => number(out, *count),
        Reply::Flag(flag) => out.push(u8::from(*flag)),
        Reply::Names(names) => list(out, names),
        Reply::Values(values) => list(out, values),
        Reply::Failed(reason) => bytes(out, reason.as_bytes()),
    }
}

fn head(id: u64, kind: u8, out: &mut Vec<u8>) {
    number(out, id);
    out.push(kind);
}

fn number(out: &mut Vec<u8>, number: u64) {
    out.extend(number.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn key_value(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    bytes(out, key.as_bytes());
    bytes(out, value);
}

fn key_number(out: &mut Vec<u8>, key: &str, number: u64) {
    bytes(out, key.as_bytes());
    out.extend(number.to_le_bytes());
}

fn list(out: &mut Vec<u8>, items: &[impl AsRef<[u8]>]) {
    out.extend((items.len() as u32).to_le_bytes());
    items.iter().for_each(|item| bytes(out, item.as_ref()));
}

/// The part of a body that has not been read yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Short)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, FrameError> {
        Ok(u8::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn slice(&mut self) -> Result<&'a [u8], FrameError> {
        let length = u32::from_le_bytes(self.take()?) as usize;
        let (field, rest) = self.0.split_at_checked(length).ok_or(FrameError::Short)?;
        self.0 = rest;
        Ok(field)
    }

    fn bytes(&mut self) -> Result<Vec<u8>, FrameError> {
        self.slice().map(Vec::from)
    }

    fn key(&mut self) -> Result<String, FrameError> {
        let slice = self.slice()?;
        if slice.len() > MAX_KEY {
            return Err(FrameError::Key(slice.len()));
        }
        std::str::from_utf8(slice).map(String::from).map_err(|_| FrameError::Text)
    }

    /// The count is not trusted: the list grows as items are found.
    fn list<I>(&mut self, item: impl Fn(&mut Self) -> Result<I, FrameError>) -> Result<Vec<I>, FrameError> {
        let count = u32::from_le_bytes(self.take()?);
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    fn end<R>(self, read: R) -> Result<R, FrameError> {
        if self.0.is_empty() { Ok(read) } else { Err(FrameError::Long(self.0.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls() -> Vec<Call> {
        let (key, value) = (String::from("k"), b"value".to_vec());
        let keys = vec![key.clone(), String::new()];
        let compare = |expected| Request::CompareSet { key: "k".into(), expected, desired: b"d".to_vec() };
        let requests = [
            Request::Set { key: key.clone(), value: value.clone() },
            Request::Get { key: key.clone() },
            Request::Wait { keys: keys.clone() },
            Request::Add { key: key.clone(), delta: -5 },
            compare(None),
            compare(Some(Vec::new())),
            Request::Append { key: key.clone(), value: value.clone() },
            Request::Tail { key: key.clone(), from: 1 << 40 },
            Request::Delete { key: key.clone() },
            Request::NumKeys,
            Request::List { prefix: key.clone() },
            Request::MultiGet { keys },
            Request::MultiSet { pairs: vec![(key, value)] },
        ];
        requests.into_iter().map(Call::Request).chain([Call::Cancel(7), Call::Bye, Call::Ping]).collect()
    }

    fn replies() -> Vec<Reply> {
        vec![
            Reply::Done,
            Reply::Bytes(b"x".to_vec()),
            Reply::Number(-1),
            Reply::Count(u64::MAX),
            Reply::Flag(true),
            Reply::Names(vec!["a".into(), "b".into()]),
            Reply::Values(vec![Vec::new(), b"y".to_vec()]),
            Reply::Cancelled,
            Reply::Failed("why".into()),
        ]
    }

    #[test]
    fn every_call_and_reply_round_trips_and_incomplete_ones_are_errors() {
        for (id, call) in calls().iter().enumerate() {
            let mut bytes = Vec::new();
            encode_call(id as u64, 5, call, &mut bytes);
            let frame = Frame::read(&bytes).unwrap();
            assert_eq!((frame.id, frame.call()), (id as u64, Ok((5, call.clone()))));
            for cut in 0..bytes.len() {
                let part = Frame::read(&bytes[..cut]).and_then(|frame| frame.call());
                assert_eq!(part, Err(FrameError::Short), "{call:?} cut at {cut}");
            }
        }
        for reply in &replies() {
            let mut bytes = Vec::new();
            encode_reply(9, reply, &mut bytes);
            assert_eq!(Frame::read(&bytes).unwrap().reply().as_ref(), Ok(reply));
            for cut in 0..bytes.len() {
                let part = Frame::read(&bytes[..cut]).and_then(|frame| frame.reply());
                assert_eq!(part, Err(FrameError::Short), "{reply:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn counts_and_lengths_inside_a_body_are_not_trusted() {
        let read = |kind, body: &[u8]| Frame { id: 1, kind, body: &[&[0; 8], body].concat() }.call();
        assert_eq!(read(3, &u32::MAX.to_le_bytes()), Err(FrameError::Short));
        assert_eq!(read(2, &u32::MAX.to_le_bytes()), Err(FrameError::Short));
        assert_eq!(read(14, b"x"), Err(FrameError::Long(1)));
        assert_eq!(read(99, b""), Err(FrameError::Kind(99)));
        let mut long = (MAX_KEY as u32 + 1).to_le_bytes().to_vec();
        long.extend(vec![b'k'; MAX_KEY + 1]);
        assert_eq!(read(2, &long), Err(FrameError::Key(MAX_KEY + 1)));
        assert_eq!(read(2, b"\x01\0\0\0\xff"), Err(FrameError::Text));
    }
}
