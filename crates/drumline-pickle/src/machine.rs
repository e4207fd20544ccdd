//! The stack machine of a pickle, with the operations that `torch.save` writes.
//!
//! ```text
//!   bytes ─▶ operation ─▶ stack of nodes, marks in it, memo ─▶ STOP: the node on top
//! ```
//! Calls are not made. `torch` knows what a few of them would have made; all others become opaque objects.

use std::collections::HashMap;

use crate::error::PickleError;
use crate::opcode as op;
use crate::torch;
use crate::value::{Id, Node, Object, Pickle, Span};

/// The longest pickle that is read. Tensors are not in it, only their descriptions.
const LONGEST: usize = 256 << 20;

/// The most objects that a pickle may build.
const MOST_NODES: usize = 4 << 20;

/// The highest version of the format.
const HIGHEST_PROTOCOL: u8 = 5;

type Result<T = ()> = std::result::Result<T, PickleError>;

pub(crate) struct Machine {
    pub(crate) bytes: Vec<u8>,
    pub(crate) nodes: Vec<Node>,
    /// The next byte.
    next: usize,
    /// The first byte of the current operation.
    at: usize,
    stack: Vec<Id>,
    /// The height of the stack at each mark.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

/// Runs a pickle to its end.
pub(crate) fn run(bytes: Vec<u8>) -> Result<Pickle> {
    if bytes.len() > LONGEST {
        return Err(PickleError::TooLong { len: bytes.len(), limit: LONGEST });
    }
    let mut machine = Machine {
        bytes,
        nodes: Vec::new(),
        next: 0,
        at: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    loop {
        machine.at = machine.next;
        let opcode = machine.byte()?;
        if opcode == op::STOP {
            let root = machine.pop()?;
            let Machine { bytes, nodes, .. } = machine;
            return Ok(Pickle { bytes, nodes, root });
        }
        machine.carry_out(opcode)?;
    }
}

impl Machine {
    fn carry_out(&mut self, opcode: u8) -> Result {
        match opcode {
            op::PROTO => self.protocol(),
            op::FRAME => self.take(8).map(drop),
            op::MARK => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            op::POP => self.pop_or_unmark(),
            op::POP_MARK => self.above_mark().map(drop),
            op::DUP => {
                let top = self.top()?;
                self.stack.push(top);
                Ok(())
            }
            op::BINPUT | op::LONG_BINPUT | op::MEMOIZE => self.remember(opcode),
            op::BINGET | op::LONG_BINGET => self.recall(opcode),
            op::REDUCE | op::NEWOBJ | op::NEWOBJ_EX | op::BUILD | op::BINPERSID => self.make(opcode),
            op::APPEND | op::APPENDS | op::ADDITEMS | op::SETITEM | op::SETITEMS => self.fill(opcode),
            _ => self.push_new(opcode),
        }
    }

    /// Operations that push a new object.
    fn push_new(&mut self, opcode: u8) -> Result {
        let node = match opcode {
            op::NONE => Node::None,
            op::NEWTRUE => Node::Bool(true),
            op::NEWFALSE => Node::Bool(false),
            op::BININT => Node::Int(i64::from(i32::from_le_bytes(self.array()?))),
            op::BININT1 => Node::Int(i64::from(self.byte()?)),
            op::BININT2 => Node::Int(i64::from(u16::from_le_bytes(self.array()?))),
            op::LONG1 | op::LONG4 => self.long(opcode)?,
            op::BINFLOAT => Node::Float(f64::from_be_bytes(self.array()?)),
            op::EMPTY_LIST | op::EMPTY_SET => Node::List(Vec::new()),
            op::EMPTY_DICT => Node::Dict(Vec::new()),
            op::EMPTY_TUPLE => Node::Tuple(Vec::new()),
            op::LIST | op::FROZENSET => Node::List(self.above_mark()?),
            op::TUPLE => Node::Tuple(self.above_mark()?),
            op::TUPLE1 => Node::Tuple(self.pop_several(1)?),
            op::TUPLE2 => Node::Tuple(self.pop_several(2)?),
            op::TUPLE3 => Node::Tuple(self.pop_several(3)?),
            op::DICT => {
                let members = self.above_mark()?;
                Node::Dict(self.pairs(&members)?)
            }
            op::GLOBAL => Node::Global { module: self.line()?, name: self.line()? },
            op::STACK_GLOBAL => {
                let name = self.pop_text()?;
                Node::Global { module: self.pop_text()?, name }
            }
            _ => self.string(opcode)?,
        };
        let id = self.add(node)?;
        self.stack.push(id);
        Ok(())
    }

    fn string(&mut self, opcode: u8) -> Result<Node> {
        let len = match opcode {
            op::SHORT_BINUNICODE | op::SHORT_BINBYTES | op::SHORT_BINSTRING => u64::from(self.byte()?),
            op::BINUNICODE | op::BINBYTES | op::BINSTRING => u64::from(u32::from_le_bytes(self.array()?)),
            op::BINUNICODE8 | op::BINBYTES8 | op::BYTEARRAY8 => u64::from_le_bytes(self.array()?),
            _ => return Err(PickleError::Refused { at: self.at, opcode }),
        };
        let span = self.take(usize::try_from(len).unwrap_or(usize::MAX))?;
        let is_text = std::str::from_utf8(self.slice(&span)).is_ok();
        let is_string = matches!(opcode, op::SHORT_BINUNICODE | op::BINUNICODE | op::BINUNICODE8);
        let is_old_string = matches!(opcode, op::SHORT_BINSTRING | op::BINSTRING);
        if is_string && !is_text {
            return Err(self.malformed("a string is not UTF-8"));
        }
        let is_text = is_string || (is_old_string && is_text);
        Ok(if is_text { Node::Text(span) } else { Node::Bytes })
    }

    /// An integer of any length, least significant byte first, in two's complement.
    fn long(&mut self, opcode: u8) -> Result<Node> {
        let len = match opcode {
            op::LONG1 => usize::from(self.byte()?),
            _ => u32::from_le_bytes(self.array()?) as usize,
        };
        let span = self.take(len)?;
        let digits = self.slice(&span);
        if digits.len() > 8 {
            return Ok(Node::LargeInt);
        }
        let is_negative = digits.last().is_some_and(|last| last & 0x80 != 0);
        let mut whole = if is_negative { [0xff; 8] } else { [0; 8] };
        whole[..digits.len()].copy_from_slice(digits);
        Ok(Node::Int(i64::from_le_bytes(whole)))
    }

    /// Operations that turn objects on the stack into another.
    fn make(&mut self, opcode: u8) -> Result {
        let node = match opcode {
            op::BINPERSID => {
                let id = self.pop()?;
                Node::Storage(torch::storage(self, id)?.into())
            }
            op::BUILD => return self.build(),
            op::NEWOBJ_EX => {
                let _keywords = self.pop()?;
                let (args, class) = (self.pop()?, self.pop()?);
                Node::Object(Object { class, args, entries: Vec::new(), state: None })
            }
            _ => {
                let (args, class) = (self.pop()?, self.pop()?);
                match torch::called(self, class, args)? {
                    torch::Called::Known(node) => node,
                    torch::Called::Argument(id) => {
                        self.stack.push(id);
                        return Ok(());
                    }
                    torch::Called::Unknown => {
                        Node::Object(Object { class, args, entries: Vec::new(), state: None })
                    }
                }
            }
        };
        let id = self.add(node)?;
        self.stack.push(id);
        Ok(())
    }

    /// Gives attributes to the object below. Containers and tensors have none that count.
    fn build(&mut self) -> Result {
        let state = self.pop()?;
        let object = self.top()?;
        if let Node::Object(object) = &mut self.nodes[object.0 as usize] {
            object.state = Some(state);
        }
        Ok(())
    }

    /// Adds members to the container below.
    fn fill(&mut self, opcode: u8) -> Result {
        let members = match opcode {
            op::APPEND => self.pop_several(1)?,
            op::SETITEM => self.pop_several(2)?,
            _ => self.above_mark()?,
        };
        let has_keys = matches!(opcode, op::SETITEM | op::SETITEMS);
        let pairs = if has_keys { self.pairs(&members)? } else { Vec::new() };
        let container = self.top()?;
        match &mut self.nodes[container.0 as usize] {
            Node::List(items) if !has_keys => items.extend(members),
            Node::Dict(entries) if has_keys => entries.extend(pairs),
            Node::Object(object) => object.entries.extend(pairs),
            _ => return Err(self.malformed("members are added to something that has none")),
        }
        Ok(())
    }

    fn pairs(&self, members: &[Id]) -> Result<Vec<(Id, Id)>> {
        let (pairs, rest) = members.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(self.malformed("a key has no value"));
        }
        Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
    }

    fn protocol(&mut self) -> Result {
        match self.byte()? {
            0..=HIGHEST_PROTOCOL => Ok(()),
            _ => Err(self.malformed("it is of a later version of the format")),
        }
    }

    fn remember(&mut self, opcode: u8) -> Result {
        let key = match opcode {
            op::BINPUT => u32::from(self.byte()?),
            op::LONG_BINPUT => u32::from_le_bytes(self.array()?),
            _ => self.memo.len() as u32,
        };
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, opcode: u8) -> Result {
        let key = match opcode {
            op::BINGET => u32::from(self.byte()?),
            _ => u32::from_le_bytes(self.array()?),
        };
        let id =
            self.memo.get(&key).copied().ok_or_else(|| self.malformed("it recalls what it never kept"))?;
        self.stack.push(id);
        Ok(())
    }

    fn add(&mut self, node: Node) -> Result<Id> {
        if self.nodes.len() >= MOST_NODES {
            return Err(PickleError::TooMany { limit: MOST_NODES });
        }
        self.nodes.push(node);
        Ok(Id(self.nodes.len() as u32 - 1))
    }

    /// The lowest place on the stack that operations may use: objects below a mark are for the one that ends it.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Id> {
        let top = self.stack[self.floor()..].last();
        top.copied().ok_or_else(|| self.malformed("the stack is empty"))
    }

    fn pop(&mut self) -> Result<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_several(&mut self, num: usize) -> Result<Vec<Id>> {
        let rest = self.stack.len().checked_sub(num).filter(|rest| *rest >= self.floor());
        let rest = rest.ok_or_else(|| self.malformed("the stack is too short"))?;
        Ok(self.stack.split_off(rest))
    }

    fn pop_text(&mut self) -> Result<Span> {
        let id = self.pop()?;
        match &self.nodes[id.0 as usize] {
            Node::Text(span) => Ok(span.clone()),
            _ => Err(self.malformed("the name of a class is not a string")),
        }
    }

    fn pop_or_unmark(&mut self) -> Result {
        if self.stack.len() == self.floor() && self.marks.pop().is_some() {
            return Ok(());
        }
        self.pop().map(drop)
    }

    fn above_mark(&mut self) -> Result<Vec<Id>> {
        let mark = self.marks.pop().ok_or_else(|| self.malformed("there is no mark"))?;
        Ok(self.stack.split_off(mark))
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let span = self.take(N)?;
        let mut array = [0; N];
        array.copy_from_slice(self.slice(&span));
        Ok(array)
    }

    fn take(&mut self, len: usize) -> Result<Span> {
        let end = self.next.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(PickleError::Truncated { at: self.at })?;
        let span = self.next as u32..end as u32;
        self.next = end;
        Ok(span)
    }

    /// The text up to the end of the line.
    fn line(&mut self) -> Result<Span> {
        let len = self.bytes[self.next..].iter().position(|byte| *byte == b'\n');
        let len = len.ok_or(PickleError::Truncated { at: self.at })?;
        let span = self.take(len)?;
        self.take(1)?;
        if std::str::from_utf8(self.slice(&span)).is_err() {
            return Err(self.malformed("the name of a class is not UTF-8"));
        }
        Ok(span)
    }

    pub(crate) fn slice(&self, span: &Span) -> &[u8] {
        &self.bytes[span.start as usize..span.end as usize]
    }

    pub(crate) fn node(&self, id: Id) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub(crate) fn malformed(&self, what: &'static str) -> PickleError {
        PickleError::Malformed { at: self.at, what }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Pickle {
        Pickle::read(bytes.to_vec()).unwrap()
    }

    fn refused(bytes: &[u8]) -> String {
        Pickle::read(bytes.to_vec()).unwrap_err().to_string()
    }

    #[test]
    fn plain_containers_are_read() {
        // pickle.dumps({"a": [1, -2, 2.5, None, True], ("b", 300): {"c"}}, protocol=2), and the same in protocol 4.
        let pickles: [&[u8]; 2] = [
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffG@\x04\x00\x00\x00\x00\x00\x00N\x88e\
              X\x01\x00\x00\x00bq\x03M,\x01\x86q\x04c__builtin__\nset\nq\x05]q\x06X\x01\x00\x00\x00cq\x07a\x85q\x08Rq\tu.",
            b"\x80\x04\x95\x30\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffG@\x04\x00\x00\x00\x00\x00\x00N\x88e\
              \x8c\x01b\x94M,\x01\x86\x94\x8f\x94(\x8c\x01c\x94\x90u.",
        ];
        for bytes in pickles {
            let pickle = read(bytes);
            let root = pickle.root();
            let list: Vec<_> = root.get("a").unwrap().items().unwrap().collect();
            assert_eq!([list[0].as_int(), list[1].as_int()], [Some(1), Some(-2)]);
            assert_eq!(
                (list[2].as_float(), list[3].is_none(), list[4].as_bool()),
                (Some(2.5), true, Some(true))
            );
            let (key, set) = root.entries().unwrap().nth(1).unwrap();
            assert_eq!(key.items().unwrap().nth(1).unwrap().as_int(), Some(300));
            assert_eq!(set.items().unwrap().next().unwrap().as_text(), Some("c"));
        }
    }

    #[test]
    fn nothing_is_called() {
        // os.system("touch /tmp/called"), as an attacker would pickle it.
        let pickle = read(b"cposix\nsystem\n(X\x11\x00\x00\x00touch /tmp/calledtR.");
        assert_eq!(pickle.root().class(), Some(("posix", "system")));
        assert_eq!(pickle.root().describe(), "a `posix.system`");
        assert!(!std::path::Path::new("/tmp/called").exists());
    }

    #[test]
    fn unknown_objects_keep_their_state() {
        // An object of class m.C with the attribute x = 5, and an enum of integers.
        let pickle = read(b"\x80\x02cm\nC\n)\x81}X\x01\x00\x00\x00xK\x05sb.");
        assert_eq!(pickle.root().state().unwrap().get("x").unwrap().as_int(), Some(5));
        assert_eq!(read(b"cm\nStage\nK\x03\x85R.").root().as_int(), Some(3));
        // A dict of a class of its own.
        let pickle = read(b"cm\nD\n)\x81X\x01\x00\x00\x00kK\x07s.");
        assert_eq!(pickle.root().get("k").unwrap().as_int(), Some(7));
    }

    #[test]
    fn integers_of_all_lengths() {
        let int = |bytes: &[u8]| read(bytes).root().as_int();
        assert_eq!(int(b"\x8a\x00."), Some(0));
        assert_eq!(int(b"\x8a\x02\x00\xff."), Some(-256));
        assert_eq!(int(b"\x8a\x05\x00\x00\x00\x00\x01."), Some(1 << 32));
        assert_eq!(int(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."), None);
    }

    #[test]
    fn an_object_may_contain_itself() {
        let pickle = read(b"]q\x00h\x00a.");
        let inner = pickle.root().items().unwrap().next().unwrap();
        assert_eq!(inner.items().unwrap().len(), 1);
    }

    #[test]
    fn bad_pickles_are_refused() {
        assert!(refused(b"").contains("ends after byte 0"));
        assert!(refused(b"X\xff\xff\xff\xffa.").contains("ends after byte 0"));
        assert!(refused(b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.").contains("ends after"));
        assert!(refused(b"I1\n.").contains("operation 0x49 at byte 0, which is refused"));
        assert!(refused(b"\x82\x01.").contains("0x82"), "extensions");
        assert!(refused(b"\x80\x06.").contains("later version"));
        assert!(refused(b"a.").contains("the stack is too short"));
        assert!(refused(b"N(.").contains("the stack is empty"), "what is below a mark is not used");
        assert!(refused(b"t.").contains("no mark"));
        assert!(refused(b"h\x07.").contains("recalls"));
        assert!(refused(b"]K\x01K\x02s.").contains("has none"));
        assert!(refused(b"}(K\x01u.").contains("a key has no value"));
        assert!(refused(b"K\x01Q.").contains("not that of a storage"));
        assert!(refused(b"\x8c\x01\xff.").contains("not UTF-8"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Pickle::read(bytes);
        }

        #[test]
        fn any_operations_are_carried_out_or_refused(
            picks in prop::collection::vec(prop::sample::select(&b"NK)]}(tRQabesu0123h\x00q\x85\x86\x87\x88cX2"[..]), 0..60)
        ) {
            let _ = Pickle::read([&picks[..], b"."].concat());
        }
    }
}
