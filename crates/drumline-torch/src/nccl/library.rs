//! The few functions of NCCL that are used, and where the library is found: in this process, as libtorch's CUDA half brings it, or where
//! pip puts it beside libtorch.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::cuda::{self, CudaError, cause};
use crate::error::TorchError;

/// `ncclComm_t`.
pub(crate) type RawComm = *mut c_void;

/// What a function answers: 0, or why not.
pub(crate) type Code = c_int;

/// Done.
pub(crate) const SUCCESS: Code = 0;
/// Not done yet; ask again.
pub(crate) const IN_PROGRESS: Code = 7;

/// By which the ranks of a communicator find each other: made by one of them, given to all.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// The beginning of `ncclConfig_t`, as it was in version 2.14: later libraries take the rest as not set.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Where the next field lies in later versions; this says that it is not set.
    padding: c_int,
}

impl Config {
    /// Calls return at once, also the one that makes the communicator, so that a rank that does not come cannot hold this one.
    pub(crate) fn without_waiting() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_400,
            blocking: 0,
            padding: c_int::MIN,
        }
    }
}

/// For tests only: names a library that is opened instead of NCCL and that lets ranks share a GPU, which NCCL refuses. See `nccl_stand_in`
/// of `rank-test`.
const STAND_IN: &str = "DRUMLINE_TEST_NCCL";

/// The library that stands in for NCCL, if a test has named one.
pub(crate) fn stand_in() -> Option<PathBuf> {
    std::env::var_os(STAND_IN).map(PathBuf::from)
}

/// Names a function of NCCL once, with its type.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $answer:ty;)*) => {
        /// NCCL, opened.
        #[derive(Debug)]
        pub(crate) struct Nccl {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl Nccl {
            fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of NCCL's header, which have not changed since version 2.14.
                unsafe { Ok(Self { $($name: *library.get(concat!($symbol, "\0").as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int) -> Code;
    unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Code;
    init_rank = "ncclCommInitRankConfig": fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> Code;
    finalize = "ncclCommFinalize": fn(RawComm) -> Code;
    destroy = "ncclCommDestroy": fn(RawComm) -> Code;
    abort = "ncclCommAbort": fn(RawComm) -> Code;
    async_error = "ncclCommGetAsyncError": fn(RawComm, *mut Code) -> Code;
    error_string = "ncclGetErrorString": fn(Code) -> *const c_char;
    last_error = "ncclGetLastError": fn(RawComm) -> *const c_char;
    group_start = "ncclGroupStart": fn() -> Code;
    group_end = "ncclGroupEnd": fn() -> Code;
    all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Code;
    reduce = "ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, RawComm, *mut c_void) -> Code;
    broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Code;
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> Code;
    reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Code;
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Code;
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> Code;
    create_scaled_sum = "ncclRedOpCreatePreMulSum": fn(*mut c_int, *mut c_void, c_int, c_int, RawComm) -> Code;
    destroy_op = "ncclRedOpDestroy": fn(c_int, RawComm) -> Code;
}

impl Nccl {
    /// Opens it, once in the life of a process, after libtorch's CUDA half.
    pub(crate) fn open() -> Result<&'static Self, TorchError> {
        static OPENED: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
        cuda::open()?;
        Ok(OPENED.get_or_init(|| open_from(&places())).as_ref().map_err(Clone::clone)?)
    }

    /// As NCCL counts: 22809 is 2.28.9.
    pub(crate) fn version(&self) -> Result<i32, TorchError> {
        let mut version = 0;
        // SAFETY: fills one number.
        self.check(unsafe { (self.get_version)(&mut version) }, "cannot ask NCCL for its version")?;
        Ok(version)
    }

    /// A new one.
    pub(crate) fn new_unique_id(&self) -> Result<UniqueId, TorchError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: fills what it is given.
        self.check(unsafe { (self.unique_id)(&mut id) }, "cannot begin a communicator of NCCL")?;
        Ok(id)
    }

    /// An error in NCCL's words, unless all is well or still under way.
    pub(crate) fn check(&self, code: Code, doing: &'static str) -> Result<(), TorchError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            other => Err(TorchError::Refused { doing, message: self.words(other) }),
        }
    }

    /// NCCL's words for an error.
    pub(crate) fn words(&self, code: Code) -> String {
        // SAFETY: both texts are NCCL's own; without a communicator the last error of the process is told.
        let (what, last) = unsafe { ((self.error_string)(code), (self.last_error)(std::ptr::null_mut())) };
        let what = text(what);
        match text(last) {
            last if last.is_empty() => format!("NCCL: {what}; try NCCL_DEBUG=WARN"),
            last => format!("NCCL: {what} ({}); try NCCL_DEBUG=WARN", last.trim()),
        }
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NCCL ends its texts with a zero, and keeps them.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Where it may be, in the order in which it is looked for.
fn places() -> Vec<PathBuf> {
    if let Some(library) = stand_in() {
        return vec![library];
    }
    let beside = cuda::libtorch_folder().map(|folder| folder.join("../../nvidia/nccl/lib/libnccl.so.2"));
    std::iter::once(PathBuf::from("libnccl.so.2")).chain(beside).collect()
}

fn open_from(places: &[PathBuf]) -> Result<Nccl, CudaError> {
    let library = String::from("libnccl.so.2");
    let mut causes = Vec::new();
    for place in places {
        // SAFETY: NCCL's initializers only register what is in it.
        let opened = unsafe { Library::open(Some(place), RTLD_NOW | RTLD_GLOBAL) };
        match opened.and_then(|library| {
            let functions = Nccl::of(&library);
            // It is used until the end.
            std::mem::forget(library);
            functions
        }) {
            Ok(functions) => return Ok(functions),
            Err(error) => causes.push(cause(&error)),
        }
    }
    Err(CudaError::Unopened { library, cause: causes.join("; ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_told_with_all_places_where_it_was_looked_for() {
        let places = [PathBuf::from("libnot_there.so.2"), PathBuf::from("/nowhere/libnccl.so.2")];
        let told = open_from(&places).unwrap_err().to_string();
        assert!(told.starts_with("cannot open libnccl.so.2: libnot_there.so.2"), "{told}");
        assert!(
            told.contains("/nowhere/libnccl.so.2") && told.contains("try `cargo xtask libtorch --cuda`"),
            "{told}"
        );
    }

    #[test]
    fn a_library_without_the_functions_is_no_nccl() {
        let told = open_from(&[PathBuf::from("libc.so.6")]).unwrap_err().to_string();
        assert!(told.contains("ncclGetVersion"), "{told}");
    }

    #[test]
    fn the_configuration_is_as_long_as_it_was_in_the_version_it_names() {
        assert_eq!(size_of::<Config>(), 24);
    }
}
