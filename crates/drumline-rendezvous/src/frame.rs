//! Frames between a store's client and its server: fixed binary schema, length first, sequence numbered.
//!
//! ```text
//!  ┌──────────┬─────────┬─────────┬──────────┐
//!  │ length 4 │ seq 8   │ kind 1  │ body     │    little endian; length counts what follows it
//!  └──────────┴─────────┴─────────┴──────────┘    in a body: bytes = length 4 + bytes, list = count 4 + items
//! ```
//! A client numbers what it sends 1, 2, 3, ..; a reply bears the number of its request, and each request gets
//! exactly one. `Cancel` and `Bye` get none of their own. A server that ends a connection because of what it was
//! sent says why in a `Failed` reply with number 0.
//!
//! Lengths are checked before anything is allocated or waited for. Not here: reading and writing sockets.

use crate::store::request::{MAX_KEY, MAX_VALUE, Reply, Request};

/// Longest frame, without its length field: the values of one request, a key, and room for the lengths.
pub const MAX_FRAME: usize = MAX_VALUE + 2 * MAX_KEY;
/// Bytes before the body.
pub const HEAD: usize = 4 + 8 + 1;

/// Why bytes are not a frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Length field out of range.
    #[error("a frame has 9 to {MAX_FRAME} bytes, got a length of {length}")]
    Length {
        /// What the field says.
        length: u32,
    },
    /// Numbers must follow on each other.
    #[error("expected frame number {expected}, got {got}")]
    Sequence {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        got: u64,
    },
    /// No such kind.
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
    /// Call off the wait with this number; it is answered with `Cancelled` unless it has been answered before.
    Cancel(u64),
    /// This member leaves in good order.
    Bye,
}

/// One frame in a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its number.
    pub seq: u64,
    kind: u8,
    body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Takes the first frame off `buffer` if it is all there; the length is checked as soon as it can be read.
    pub fn split(buffer: &mut &'a [u8]) -> Result<Option<Frame<'a>>, FrameError> {
        let Some((length, rest)) = buffer.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length);
        if !(HEAD - 4..=MAX_FRAME).contains(&(length as usize)) {
            return Err(FrameError::Length { length });
        }
        let Some((frame, after)) = rest.split_at_checked(length as usize) else { return Ok(None) };
        let mut fields = Fields(frame);
        let (seq, kind) = (fields.u64()?, fields.u8()?);
        *buffer = after;
        Ok(Some(Frame { seq, kind, body: fields.0 }))
    }

    /// Reads it as what a client sends.
    pub fn call(&self) -> Result<Call, FrameError> {
        let mut body = Fields(self.body);
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
            kind => return Err(FrameError::Kind(kind)),
        };
        body.end(call)
    }

    /// Reads it as what a server sends.
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

/// Adds a client's frame to `out`.
pub fn encode_call(seq: u64, call: &Call, out: &mut Vec<u8>) {
    let request = match call {
        Call::Request(request) => request,
        Call::Cancel(target) => return frame(13, seq, out, |out| out.extend(target.to_le_bytes())),
        Call::Bye => return frame(14, seq, out, |_| {}),
    };
    match request {
        Request::Set { key, value } => frame(1, seq, out, |out| key_value(out, key, value)),
        Request::Get { key } => frame(2, seq, out, |out| bytes(out, key.as_bytes())),
        Request::Wait { keys } => frame(3, seq, out, |out| list(out, keys)),
        Request::Add { key, delta } => frame(4, seq, out, |out| key_number(out, key, *delta as u64)),
        Request::CompareSet { key, expected, desired } => frame(5, seq, out, |out| {
            bytes(out, key.as_bytes());
            list(out, expected.as_slice());
            bytes(out, desired);
        }),
        Request::Append { key, value } => frame(6, seq, out, |out| key_value(out, key, value)),
        Request::Tail { key, from } => frame(7, seq, out, |out| key_number(out, key, *from)),
        Request::Delete { key } => frame(8, seq, out, |out| bytes(out, key.as_bytes())),
        Request::NumKeys => frame(9, seq, out, |_| {}),
        Request::List { prefix } => frame(10, seq, out, |out| bytes(out, prefix.as_bytes())),
        Request::MultiGet { keys } => frame(11, seq, out, |out| list(out, keys)),
        Request::MultiSet { pairs } => frame(12, seq, out, |out| {
            out.extend((pairs.len() as u32).to_le_bytes());
            pairs.iter().for_each(|(key, value)| key_value(out, key, value));
        }),
    }
}

/// Adds a server's frame to `out`.
pub fn encode_reply(seq: u64, reply: &Reply, out: &mut Vec<u8>) {
    match reply {
        Reply::Done => frame(128, seq, out, |_| {}),
        Reply::Bytes(value) => frame(129, seq, out, |out| bytes(out, value)),
        Reply::Number(number) => frame(130, seq, out, |out| out.extend(number.to_le_bytes())),
        Reply::Count(count) => frame(131, seq, out, |out| out.extend(count.to_le_bytes())),
        Reply::Flag(flag) => frame(132, seq, out, |out| out.push(u8::from(*flag))),
        Reply::Names(names) => frame(133, seq, out, |out| list(out, names)),
        Reply::Values(values) => frame(134, seq, out, |out| list(out, values)),
        Reply::Cancelled => frame(135, seq, out, |_| {}),
        Reply::Failed(reason) => frame(136, seq, out, |out| bytes(out, reason.as_bytes())),
    }
}

/// Head, body, and then the length that came out of it.
fn frame(kind: u8, seq: u64, out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend([0; 4]);
    out.extend(seq.to_le_bytes());
    out.push(kind);
    body(out);
    let length = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
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
        requests.into_iter().map(Call::Request).chain([Call::Cancel(7), Call::Bye]).collect()
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
    fn every_call_and_reply_comes_back_and_no_part_of_it_does() {
        let mut frames = Vec::new();
        for (seq, call) in calls().iter().enumerate() {
            let mut bytes = Vec::new();
            encode_call(seq as u64, call, &mut bytes);
            let frame = Frame::split(&mut bytes.as_slice()).unwrap().unwrap();
            assert_eq!((frame.seq, frame.call().as_ref()), (seq as u64, Ok(call)));
            frames.push(bytes);
        }
        for reply in &replies() {
            let mut bytes = Vec::new();
            encode_reply(9, reply, &mut bytes);
            assert_eq!(Frame::split(&mut bytes.as_slice()).unwrap().unwrap().reply().as_ref(), Ok(reply));
            frames.push(bytes);
        }
        for bytes in frames {
            for cut in 0..bytes.len() {
                assert_eq!(Frame::split(&mut &bytes[..cut]), Ok(None), "cut at {cut}");
            }
        }
    }

    #[test]
    fn lengths_beyond_the_limit_are_refused_from_four_bytes() {
        for length in [0, 8, MAX_FRAME as u32 + 1, u32::MAX] {
            let bytes = length.to_le_bytes();
            assert_eq!(Frame::split(&mut &bytes[..]), Err(FrameError::Length { length }));
        }
        assert_eq!(Frame::split(&mut &(MAX_FRAME as u32).to_le_bytes()[..]), Ok(None));
    }

    #[test]
    fn counts_and_lengths_inside_a_body_are_not_believed() {
        let read = |kind, body: &[u8]| Frame { seq: 1, kind, body }.call();
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
