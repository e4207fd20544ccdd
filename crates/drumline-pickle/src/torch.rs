//! The calls from which PyTorch's pickles build tensors, and what they stand for.

use crate::error::PickleError;
use crate::machine::Machine;
use crate::value::{Id, Node};

type Result<T> = std::result::Result<T, PickleError>;

/// The most dims of a tensor.
const MOST_DIMS: usize = 16;

/// The longest name of a storage; torch.save numbers them.
const LONGEST_KEY: usize = 64;

/// An element type of PyTorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are PyTorch's")]
pub enum Dtype {
    Float64,
    Float32,
    Float16,
    BFloat16,
    Float8E4M3Fn,
    Float8E5M2,
    Int64,
    Int32,
    Int16,
    Int8,
    UInt8,
    Bool,
}

/// Each type, its size in bytes, the class of its storages, and its name in the module `torch`.
const DTYPES: [(Dtype, u64, &str, &str); 12] = [
    (Dtype::Float64, 8, "DoubleStorage", "float64"),
    (Dtype::Float32, 4, "FloatStorage", "float32"),
    (Dtype::Float16, 2, "HalfStorage", "float16"),
    (Dtype::BFloat16, 2, "BFloat16Storage", "bfloat16"),
    (Dtype::Float8E4M3Fn, 1, "Float8_e4m3fnStorage", "float8_e4m3fn"),
    (Dtype::Float8E5M2, 1, "Float8_e5m2Storage", "float8_e5m2"),
    (Dtype::Int64, 8, "LongStorage", "int64"),
    (Dtype::Int32, 4, "IntStorage", "int32"),
    (Dtype::Int16, 2, "ShortStorage", "int16"),
    (Dtype::Int8, 1, "CharStorage", "int8"),
    (Dtype::UInt8, 1, "ByteStorage", "uint8"),
    (Dtype::Bool, 1, "BoolStorage", "bool"),
];

/// The class of storages that do not know the type of their elements.
const UNTYPED: &str = "UntypedStorage";

impl Dtype {
    /// The number of bytes of an element.
    pub fn size(self) -> u64 {
        DTYPES.iter().find(|(dtype, ..)| *dtype == self).map_or(0, |(_, size, ..)| *size)
    }
}

/// Where elements are: an entry of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Storage {
    /// The entry is `data/KEY`.
    pub(crate) key: String,
    /// `None` if it only knows bytes.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) num_bytes: u64,
}

/// A tensor, whose elements stay in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The distance of neighbours along each dim, in elements.
    pub strides: Vec<u64>,
    /// Its first element in the storage.
    pub(crate) first: u64,
    pub(crate) storage: Storage,
}

impl TensorInfo {
    /// The number of its elements.
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// How many elements of the storage it spans, from its first to its last.
    pub fn span(&self) -> u64 {
        if self.numel() == 0 {
            return 0;
        }
        let steps = self.shape.iter().zip(&self.strides);
        1 + steps.map(|(size, stride)| (size - 1) * stride).sum::<u64>()
    }

    /// Whether both have their elements in the same storage of a file.
    pub fn shares_storage(&self, other: &Self) -> bool {
        self.storage.key == other.storage.key
    }

    /// Checks that no size overflows and all elements are in the storage.
    fn check(self, machine: &Machine) -> Result<Self> {
        let span = || {
            let shape = self.shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size))?;
            let mut span = u64::from(shape > 0);
            for (size, stride) in self.shape.iter().zip(&self.strides).filter(|_| shape > 0) {
                span = span.checked_add((size - 1).checked_mul(*stride)?)?;
            }
            self.first.checked_add(span)?.checked_mul(self.dtype.size())
        };
        match span() {
            Some(end) if end <= self.storage.num_bytes => Ok(self),
            _ => Err(machine.malformed("a tensor is larger than its storage")),
        }
    }
}

/// What a call would have returned.
pub(crate) enum Called {
    /// A new object.
    Known(Node),
    /// One of its arguments.
    Argument(Id),
    /// This reader does not know.
    Unknown,
}

/// What calling `class` with a tuple of arguments stands for.
pub(crate) fn called(machine: &Machine, class: Id, args: Id) -> Result<Called> {
    let (Some((module, name)), Node::Tuple(args)) = (global(machine, class), machine.node(args)) else {
        return Ok(Called::Unknown);
    };
    let first = args.first().copied();
    Ok(match (module, name) {
        ("collections", "OrderedDict") if args.is_empty() => Called::Known(Node::Dict(Vec::new())),
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2" | "_rebuild_tensor_v3") => {
            Called::Known(Node::Tensor(tensor(machine, args)?.into()))
        }
        // A tensor with attributes: the function that would build it, a class, the function's arguments, the attributes.
        ("torch._tensor", "_rebuild_from_type_v2") => match (args.first(), args.get(2)) {
            (Some(function), Some(inner)) => plain(machine, *function, *inner)?,
            _ => return Err(machine.malformed("a tensor has too few parts")),
        },
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => match first {
            Some(data) => Called::Argument(data),
            None => return Err(machine.malformed("a parameter has no data")),
        },
        ("torch", "Size") | ("builtins" | "__builtin__", "set" | "frozenset" | "list" | "tuple") => {
            first.map_or(Called::Known(Node::Tuple(Vec::new())), Called::Argument)
        }
        _ => Called::Unknown,
    })
}

/// What a function that builds tensors without attributes stands for.
fn plain(machine: &Machine, function: Id, args: Id) -> Result<Called> {
    match (global(machine, function), machine.node(args)) {
        (Some(("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3")), Node::Tuple(args)) => {
            Ok(Called::Known(Node::Tensor(tensor(machine, args)?.into())))
        }
        (Some(("torch._utils", "_rebuild_parameter")), Node::Tuple(args)) => {
            Ok(args.first().map_or(Called::Unknown, |data| Called::Argument(*data)))
        }
        _ => Ok(Called::Unknown),
    }
}

/// The arguments: storage, first element, shape, strides, and in the third form the type as the seventh.
fn tensor(machine: &Machine, args: &[Id]) -> Result<TensorInfo> {
    let [storage, first, shape, strides, ..] = args else {
        return Err(machine.malformed("a tensor has too few parts"));
    };
    let Node::Storage(storage) = machine.node(*storage) else {
        return Err(machine.malformed("a tensor has no storage"));
    };
    let named = args.get(6).and_then(|id| global(machine, *id));
    let named = named.and_then(|(_, name)| DTYPES.iter().find(|(.., of_torch)| *of_torch == name));
    let dtype = storage.dtype.or(named.map(|(dtype, ..)| *dtype));
    let dtype = dtype.ok_or_else(|| machine.malformed("a tensor is of an unknown type"))?;
    let (shape, strides) = (sizes(machine, *shape)?, sizes(machine, *strides)?);
    if shape.len() != strides.len() || shape.len() > MOST_DIMS {
        return Err(machine.malformed("a tensor's shape and strides do not match"));
    }
    let first = size(machine, *first)?;
    TensorInfo { dtype, shape, strides, first, storage: Storage::clone(storage) }.check(machine)
}

/// The persistent id of a storage: `("storage", class, key, device, number of elements)`.
pub(crate) fn storage(machine: &Machine, id: Id) -> Result<Storage> {
    let malformed = || machine.malformed("a persistent id is not that of a storage");
    let Node::Tuple(parts) = machine.node(id) else { return Err(malformed()) };
    let [kind, class, key, _device, len] = parts[..] else { return Err(malformed()) };
    if text(machine, kind) != Some("storage") {
        return Err(malformed());
    }
    let ("torch" | "torch.storage", class) = global(machine, class).ok_or_else(malformed)? else {
        return Err(malformed());
    };
    let found = DTYPES.iter().find(|(_, _, storage, _)| *storage == class);
    if found.is_none() && class != UNTYPED {
        return Err(machine.malformed("a storage is of an unknown type"));
    }
    let element = found.map_or(1, |(_, size, ..)| *size);
    let num_bytes = size(machine, len)?.checked_mul(element).ok_or_else(malformed)?;
    let key = text(machine, key).filter(|key| key.len() <= LONGEST_KEY).ok_or_else(malformed)?.to_owned();
    Ok(Storage { key, dtype: found.map(|(dtype, ..)| *dtype), num_bytes })
}

fn sizes(machine: &Machine, id: Id) -> Result<Vec<u64>> {
    match machine.node(id) {
        Node::Tuple(sizes) | Node::List(sizes) if sizes.len() <= MOST_DIMS => {
            sizes.iter().map(|id| size(machine, *id)).collect()
        }
        _ => Err(machine.malformed("a shape is not a tuple of sizes")),
    }
}

fn size(machine: &Machine, id: Id) -> Result<u64> {
    let size = match machine.node(id) {
        Node::Int(size) => u64::try_from(*size).ok(),
        _ => None,
    };
    size.ok_or_else(|| machine.malformed("a size is not a number of at least 0"))
}

fn global(machine: &Machine, id: Id) -> Option<(&str, &str)> {
    let Node::Global { module, name } = machine.node(id) else { return None };
    let text = |span| std::str::from_utf8(machine.slice(span)).ok();
    Some((text(module)?, text(name)?))
}

fn text(machine: &Machine, id: Id) -> Option<&str> {
    match machine.node(id) {
        Node::Text(span) => std::str::from_utf8(machine.slice(span)).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::{Dtype, Pickle};

    /// A pickle of a tensor of this shape and strides, in a storage of this class with `numel` elements.
    fn tensor(class: &str, numel: u8, [first, rows, columns]: [u8; 3], strides: [u8; 2]) -> Vec<u8> {
        let mut bytes = b"ctorch._utils\n_rebuild_tensor_v2\n((\x8c\x07storagectorch\n".to_vec();
        bytes.extend(class.as_bytes());
        bytes.extend(b"\n\x8c\x010\x8c\x03cpuK");
        bytes.extend([numel, b't', b'Q', b'K', first, b'K', rows, b'K', columns, 0x86]);
        bytes.extend([b'K', strides[0], b'K', strides[1], 0x86, 0x89]);
        bytes.extend(b")tR.");
        bytes
    }

    #[test]
    fn a_tensor_is_described() {
        let pickle = Pickle::read(tensor("BFloat16Storage", 7, [1, 2, 3], [3, 1])).unwrap();
        let found = pickle.root().tensor().unwrap();
        assert_eq!(
            (found.dtype, &found.shape[..], &found.strides[..]),
            (Dtype::BFloat16, &[2, 3][..], &[3, 1][..])
        );
        assert_eq!((found.numel(), found.span(), found.storage.num_bytes), (6, 6, 14));
    }

    #[test]
    fn a_tensor_outside_of_its_storage_is_refused() {
        let read =
            |numel, place, strides| Pickle::read(tensor("FloatStorage", numel, place, strides)).map(drop);
        let refused = |numel, place, strides| read(numel, place, strides).unwrap_err().to_string();
        assert!(refused(6, [1, 2, 3], [3, 1]).contains("larger than its storage"));
        assert!(refused(6, [0, 2, 3], [4, 1]).contains("larger than its storage"));
        assert_eq!(read(6, [0, 2, 3], [1, 2]), Ok(()), "columns first");
        assert_eq!(read(1, [0, 2, 3], [0, 0]), Ok(()), "one element, expanded");
        assert_eq!(read(0, [0, 0, 3], [3, 1]), Ok(()), "no elements");
        let unknown = Pickle::read(tensor("QUInt8Storage", 6, [0, 2, 3], [3, 1])).unwrap_err();
        assert!(unknown.to_string().contains("a storage is of an unknown type"), "{unknown}");
    }
}
