//! What a pickle contains: nodes in one list, and a view of one of them.
//!
//! A node names its members by their places in the list, so that a pickle in which an object contains itself, or one in
//! which a small object is used a million times, takes no more memory than its bytes allow.

use std::ops::Range;

use crate::torch::{Storage, TensorInfo};

/// The place of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id(pub(crate) u32);

/// Bytes of the pickle.
pub(crate) type Span = Range<u32>;

/// An object, in the way in which it was pickled.
#[derive(Debug)]
pub(crate) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// An integer of more than 64 bits.
    LargeInt,
    Float(f64),
    Text(Span),
    Bytes,
    Tuple(Vec<Id>),
    /// A list or a set.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// A class or a function, which is only named.
    Global {
        module: Span,
        name: Span,
    },
    Storage(Box<Storage>),
    Tensor(Box<TensorInfo>),
    /// What a class or function that this reader does not know would have made.
    Object(Object),
}

#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) class: Id,
    pub(crate) args: Id,
    pub(crate) entries: Vec<(Id, Id)>,
    pub(crate) state: Option<Id>,
}

/// A pickle that was read.
#[derive(Debug)]
pub struct Pickle {
    pub(crate) bytes: Vec<u8>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) root: Id,
}

impl Pickle {
    /// Reads a pickle that begins with the first byte. What follows after its end is ignored.
    pub fn read(bytes: Vec<u8>) -> Result<Self, crate::PickleError> {
        crate::machine::run(bytes)
    }

    /// The pickled object.
    pub fn root(&self) -> Value<'_> {
        Value { pickle: self, id: self.root }
    }

    fn text(&self, span: &Span) -> &str {
        // The machine has checked it.
        std::str::from_utf8(&self.bytes[span.start as usize..span.end as usize]).unwrap_or_default()
    }
}

/// An object in a pickle.
#[derive(Debug, Clone, Copy)]
pub struct Value<'a> {
    pickle: &'a Pickle,
    id: Id,
}

impl<'a> Value<'a> {
    fn node(self) -> &'a Node {
        &self.pickle.nodes[self.id.0 as usize]
    }

    fn at(self, id: Id) -> Self {
        Self { id, ..self }
    }

    /// What it is, for errors.
    pub fn describe(self) -> String {
        match self.node() {
            Node::None => "None".into(),
            Node::Bool(_) => "a bool".into(),
            Node::Int(_) | Node::LargeInt => "an integer".into(),
            Node::Float(_) => "a float".into(),
            Node::Text(_) => "a string".into(),
            Node::Bytes => "bytes".into(),
            Node::Tuple(_) => "a tuple".into(),
            Node::List(_) => "a list".into(),
            Node::Dict(_) => "a dict".into(),
            Node::Storage(_) => "a storage".into(),
            Node::Tensor(_) => "a tensor".into(),
            Node::Global { .. } | Node::Object(_) => match self.class() {
                Some((module, name)) => format!("a `{module}.{name}`"),
                None => "an object".into(),
            },
        }
    }

    /// Whether it is `None`.
    pub fn is_none(self) -> bool {
        matches!(self.node(), Node::None)
    }

    /// Its value, if it is a bool.
    pub fn as_bool(self) -> Option<bool> {
        match self.node() {
            Node::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Its value, if it is an integer, or a member of an `enum` of integers.
    pub fn as_int(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            Node::Object(object) => match self.pickle.nodes.get(object.args.0 as usize) {
                Some(Node::Tuple(args)) => match args[..] {
                    [only] => match self.at(only).node() {
                        Node::Int(value) => Some(*value),
                        _ => None,
                    },
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }

    /// Its value, if it is a number.
    pub fn as_float(self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(*value),
            Node::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// Its value, if it is a string.
    pub fn as_text(self) -> Option<&'a str> {
        match self.node() {
            Node::Text(span) => Some(self.pickle.text(span)),
            _ => None,
        }
    }

    /// The members of a list, set or tuple.
    pub fn items(self) -> Option<impl ExactSizeIterator<Item = Self> + Clone> {
        match self.node() {
            Node::Tuple(items) | Node::List(items) => Some(items.iter().map(move |id| self.at(*id))),
            _ => None,
        }
    }

    /// The keys and values of a dict, or of an object that is a kind of dict, in their order.
    pub fn entries(self) -> Option<impl ExactSizeIterator<Item = (Self, Self)> + Clone> {
        match self.node() {
            Node::Dict(entries) | Node::Object(Object { entries, .. }) => {
                Some(entries.iter().map(move |(key, value)| (self.at(*key), self.at(*value))))
            }
            _ => None,
        }
    }

    /// The value of a text key of a dict. Of several equal keys the last one counts, as in Python.
    pub fn get(self, key: &str) -> Option<Self> {
        let mut found = self.entries()?.filter(|(name, _)| name.as_text() == Some(key));
        found.next().map(|first| found.last().unwrap_or(first).1)
    }

    /// The tensor, if it is one.
    pub fn tensor(self) -> Option<&'a TensorInfo> {
        match self.node() {
            Node::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// The module and name of the class of an opaque object, or of a class or function.
    pub fn class(self) -> Option<(&'a str, &'a str)> {
        match self.node() {
            Node::Global { module, name } => Some((self.pickle.text(module), self.pickle.text(name))),
            Node::Object(object) => match self.at(object.class).node() {
                Node::Global { module, name } => Some((self.pickle.text(module), self.pickle.text(name))),
                _ => None,
            },
            _ => None,
        }
    }

    /// The attributes of an opaque object.
    pub fn state(self) -> Option<Self> {
        match self.node() {
            Node::Object(object) => object.state.map(|state| self.at(state)),
            _ => None,
        }
    }
}
