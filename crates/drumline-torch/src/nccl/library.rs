//! The functions of NCCL that are used, and where the library is found: already loaded by libtorch's CUDA libraries, or
//! where pip installs it beside libtorch.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::shared_gpu::SharedGpu;
use crate::cuda::{self, CudaError, cause};
use crate::error::TorchError;

/// `ncclComm_t`.
pub(crate) type RawComm = *mut c_void;

/// What a function returns: 0, or an error.
pub(crate) type Code = c_int;

/// `ncclSuccess`.
pub(crate) const SUCCESS: Code = 0;
/// `ncclInProgress`: not done yet.
pub(crate) const IN_PROGRESS: Code = 7;

/// The id by which the ranks of a communicator find each other. One of them creates it and sends it to all.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// The beginning of `ncclConfig_t`, as it was in version 2.14. Later versions treat the rest as not set.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// The next field in later versions; this value means that it is not set.
    padding: c_int,
}

impl Config {
    /// Calls do not block, not even the creation of the communicator, so that a missing rank cannot block this one.
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

/// For tests only: a library to open instead of NCCL, which allows ranks to share a GPU. See `nccl_stand_in` of
/// `rank-test`.
const STAND_IN: &str = "DRUMLINE_TEST_NCCL";

/// The library to open instead of NCCL, if a test has set one.
pub(crate) fn stand_in() -> Option<PathBuf> {
    std::env::var_os(STAND_IN).map(PathBuf::from)
}

/// Declares the functions of NCCL, with their types.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) -> $answer:ty;)*) => {
        /// The opened library.
        #[derive(Debug)]
        pub(crate) struct Nccl {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $answer,)*
        }

        impl Nccl {
            fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of NCCL's header, unchanged since version 2.14.
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
    /// Opens it, once per process, after libtorch's CUDA libraries.
    pub(crate) fn open() -> Result<&'static Self, TorchError> {
        static OPENED: OnceLock<Result<Nccl, CudaError>> = OnceLock::new();
        cuda::open()?;
        SharedGpu::from_env()?.check()?;
        Ok(OPENED.get_or_init(|| open_from(&places())).as_ref().map_err(Clone::clone)?)
    }

    /// The version, as NCCL counts: 22809 is 2.28.9.
    pub(crate) fn version(&self) -> Result<i32, TorchError> {
        let mut version = 0;
        // SAFETY: writes one number.
        self.check(unsafe { (self.get_version)(&mut version) }, "cannot read NCCL's version")?;
        Ok(version)
    }

    /// Creates an id.
    pub(crate) fn new_unique_id(&self) -> Result<UniqueId, TorchError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        self.check(unsafe { (self.unique_id)(&mut id) }, "cannot begin an NCCL communicator")?;
        Ok(id)
    }

    /// An error with NCCL's text, unless the code is success or in progress.
    pub(crate) fn check(&self, code: Code, operation: &'static str) -> Result<(), TorchError> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            other => Err(TorchError::Library { operation, message: self.error_text(other) }),
        }
    }

    /// NCCL's text for an error.
    pub(crate) fn error_text(&self, code: Code) -> String {
        // SAFETY: NCCL owns both texts; without a communicator it returns the last error of the process.
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
    // SAFETY: NCCL's texts are zero-terminated and stay valid.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Where it may be, in the order of the search.
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
        // SAFETY: NCCL's initializers only register its contents.
        let opened = unsafe { Library::open(Some(place), RTLD_NOW | RTLD_GLOBAL) };
        match opened.and_then(|library| {
            let functions = Nccl::of(&library);
            // It is used until the process ends.
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
    fn the_error_of_a_missing_library_lists_all_places() {
        let places = [PathBuf::from("libnot_there.so.2"), PathBuf::from("/nowhere/libnccl.so.2")];
        let error = open_from(&places).unwrap_err().to_string();
        assert!(error.starts_with("cannot open libnccl.so.2: libnot_there.so.2"), "{error}");
        assert!(
            error.contains("/nowhere/libnccl.so.2") && error.contains("try `cargo xtask libtorch --cuda`"),
            "{error}"
        );
    }

    #[test]
    fn a_library_without_nccls_functions_is_an_error() {
        let error = open_from(&[PathBuf::from("libc.so.6")]).unwrap_err().to_string();
        assert!(error.contains("ncclGetVersion"), "{error}");
    }

    #[test]
    fn the_configuration_has_the_size_of_its_version() {
        assert_eq!(size_of::<Config>(), 24);
    }
}
