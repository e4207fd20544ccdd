//! Our own kernels: CUDA C++ that NVRTC compiles for the present GPU when it is first needed.
//!
//! ```text
//!   source ─▶ NVRTC (libnvrtc.so, part of libtorch) ─▶ driver: module, function ─▶ Kernel::launch on the current stream
//! ```
//! Launches can be recorded in a CUDA graph.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use super::error::CudaError;
use super::library::functions;
use super::properties::{CurrentDevice, Properties};
use super::stream::Stream;
use crate::error::TorchError;

type Program = *mut c_void;
type Module = *mut c_void;
type Function = *mut c_void;

/// The functions of NVRTC and of the driver that are needed, with NVIDIA's types.
struct Compiler {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    load: unsafe extern "C" fn(*mut Module, *const c_void) -> c_int,
    function: unsafe extern "C" fn(*mut Function, Module, *const c_char) -> c_int,
    launch: unsafe extern "C" fn(
        Function,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> c_int,
}

impl Compiler {
    fn open() -> Result<Self, CudaError> {
        // libtorch's CUDA libraries initialise the driver and load NVIDIA's libraries.
        functions()?;
        let open = |name: &str| {
            // SAFETY: NVIDIA's libraries; their initializers have no conditions.
            let library = unsafe { Library::new(name) };
            library
                .map_err(|error| CudaError::Unopened { library: name.to_owned(), cause: error.to_string() })
        };
        let (nvrtc, driver) = (open("libnvrtc.so.13")?, open("libcuda.so.1")?);
        let missing = |error: libloading::Error| CudaError::Unopened {
            library: "NVRTC".to_owned(),
            cause: error.to_string(),
        };
        // SAFETY: the types are those of NVIDIA's headers.
        let found = unsafe {
            Self {
                create: *nvrtc.get(b"nvrtcCreateProgram\0").map_err(missing)?,
                compile: *nvrtc.get(b"nvrtcCompileProgram\0").map_err(missing)?,
                log_size: *nvrtc.get(b"nvrtcGetProgramLogSize\0").map_err(missing)?,
                log: *nvrtc.get(b"nvrtcGetProgramLog\0").map_err(missing)?,
                cubin_size: *nvrtc.get(b"nvrtcGetCUBINSize\0").map_err(missing)?,
                cubin: *nvrtc.get(b"nvrtcGetCUBIN\0").map_err(missing)?,
                destroy: *nvrtc.get(b"nvrtcDestroyProgram\0").map_err(missing)?,
                load: *driver.get(b"cuModuleLoadData\0").map_err(missing)?,
                function: *driver.get(b"cuModuleGetFunction\0").map_err(missing)?,
                launch: *driver.get(b"cuLaunchKernel\0").map_err(missing)?,
            }
        };
        // Both are used until the process ends.
        std::mem::forget((nvrtc, driver));
        Ok(found)
    }

    /// Opened once per process.
    fn shared() -> Result<&'static Self, CudaError> {
        static OPENED: OnceLock<Result<Compiler, CudaError>> = OnceLock::new();
        OPENED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    /// Compiles a source to machine code for this GPU.
    fn cubin(&self, source: &str, gpu: &Properties, rounding: Rounding) -> Result<Vec<u8>, TorchError> {
        let has_zero = |_| TorchError::Unsupported {
            operation: "compile a kernel",
            reason: "its source has a zero byte",
        };
        let source = CString::new(source).map_err(has_zero)?;
        let (major, minor) = gpu.capability;
        let architecture = CString::new(format!("--gpu-architecture=sm_{major}{minor}")).map_err(has_zero)?;
        let rounding = match rounding {
            Rounding::Fast => c"--use_fast_math",
            Rounding::Ieee => c"--fmad=false",
        };
        let options = [architecture.as_ptr(), c"--std=c++17".as_ptr(), rounding.as_ptr()];
        let mut program = std::ptr::null_mut();
        // SAFETY: NVRTC reads zero-terminated strings, and fills buffers of the sizes that it asked for.
        unsafe {
            ok(
                (self.create)(
                    &mut program,
                    source.as_ptr(),
                    c"drumline.cu".as_ptr(),
                    0,
                    std::ptr::null(),
                    std::ptr::null(),
                ),
                "begin",
            )?;
            let code = (self.compile)(program, options.len() as c_int, options.as_ptr());
            let mut size = 0;
            if code != 0 {
                (self.log_size)(program, &mut size);
                let mut log = vec![0u8; size.max(1)];
                (self.log)(program, log.as_mut_ptr().cast());
                (self.destroy)(&mut program);
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
                return Err(TorchError::Library { operation: "cannot compile a kernel", message: log });
            }
            ok((self.cubin_size)(program, &mut size), "finish")?;
            let mut cubin = vec![0u8; size];
            ok((self.cubin)(program, cubin.as_mut_ptr().cast()), "finish")?;
            (self.destroy)(&mut program);
            Ok(cubin)
        }
    }
}

/// How the operations of a kernel round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Fast: products are added without rounding them first, some functions are approximations, and numbers below the
    /// normal ones are zero.
    Fast,
    /// Each operation to the nearest number, as on a CPU.
    Ieee,
}

/// The blocks and threads of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Blocks, in two dimensions.
    pub blocks: (u32, u32),
    /// Threads per block.
    pub threads: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

/// The kernels of one source, compiled for one GPU.
#[derive(Debug)]
pub struct Kernels {
    module: Module,
}

// SAFETY: any thread may use a module of the driver.
unsafe impl Send for Kernels {}
// SAFETY: as above; it does not change.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Whether NVRTC can be used.
    pub(crate) fn can_be_compiled() -> bool {
        Compiler::shared().is_ok()
    }

    /// Compiles a source for a GPU. Functions that are to be launched are `extern "C" __global__`.
    pub fn compile(device: usize, source: &str, rounding: Rounding) -> Result<Self, TorchError> {
        let compiler = Compiler::shared()?;
        let cubin = compiler.cubin(source, &Properties::of(device)?, rounding)?;
        let _current = CurrentDevice::enter(device)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is complete; the driver copies it.
        ok(unsafe { (compiler.load)(&mut module, cubin.as_ptr().cast()) }, "load")?;
        Ok(Self { module })
    }

    /// One of its functions.
    pub fn get(&self, name: &str) -> Result<Kernel, TorchError> {
        let compiler = Compiler::shared()?;
        let text = CString::new(name)
            .map_err(|_| TorchError::value("a kernel's name", format!("{name:?}"), "no zero byte"))?;
        let mut function = std::ptr::null_mut();
        // SAFETY: the module lives as long as the process.
        ok(unsafe { (compiler.function)(&mut function, self.module, text.as_ptr()) }, "find")?;
        Ok(Kernel { function })
    }
}

/// A function that runs on a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    function: Function,
}

// SAFETY: as `Kernels`.
unsafe impl Send for Kernel {}
// SAFETY: as `Kernels`.
unsafe impl Sync for Kernel {}

/// An argument of a kernel: eight bytes, of which the kernel reads as many as its type has.
#[derive(Debug, Clone, Copy)]
pub struct Argument([u8; 8]);

impl Argument {
    /// Its address, for the driver.
    fn place(&self) -> *mut c_void {
        self.0.as_ptr().cast_mut().cast()
    }
}

impl<T> From<*mut T> for Argument {
    fn from(pointer: *mut T) -> Self {
        Self((pointer as u64).to_ne_bytes())
    }
}

impl From<i64> for Argument {
    fn from(number: i64) -> Self {
        Self(number.to_ne_bytes())
    }
}

impl From<i32> for Argument {
    fn from(number: i32) -> Self {
        Self(i64::from(number).to_ne_bytes())
    }
}

impl From<f32> for Argument {
    fn from(number: f32) -> Self {
        Self(u64::from(number.to_bits()).to_ne_bytes())
    }
}

impl From<f64> for Argument {
    fn from(number: f64) -> Self {
        Self(number.to_ne_bytes())
    }
}

impl From<&tch::Tensor> for Argument {
    fn from(tensor: &tch::Tensor) -> Self {
        crate::usage::report(tensor);
        tensor.data_ptr().into()
    }
}

impl Kernel {
    /// Queues a launch on the current stream of a GPU.
    ///
    /// # Safety
    /// The arguments must have the types of the kernel's parameters. Pointers must point to memory of that GPU, of the
    /// size that the kernel uses, which lives until the kernel has run.
    pub unsafe fn launch(&self, device: usize, grid: Grid, arguments: &[Argument]) -> Result<(), TorchError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_by(device, grid, arguments.iter().map(Argument::place)) }
    }

    /// The same with a larger first argument: `first` has the layout of the kernel's first parameter.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(crate) unsafe fn launch_with<S>(
        &self,
        device: usize,
        grid: Grid,
        first: &S,
        arguments: &[Argument],
    ) -> Result<(), TorchError> {
        let first = std::iter::once(std::ptr::from_ref(first).cast_mut().cast());
        // SAFETY: the caller's promise.
        unsafe { self.launch_by(device, grid, first.chain(arguments.iter().map(Argument::place))) }
    }

    /// # Safety
    /// As [`launch`](Self::launch), for the addresses of the arguments.
    unsafe fn launch_by(
        &self,
        device: usize,
        grid: Grid,
        arguments: impl Iterator<Item = *mut c_void>,
    ) -> Result<(), TorchError> {
        let compiler = Compiler::shared()?;
        let stream = Stream::current(device)?.raw()?;
        let _current = CurrentDevice::enter(device)?;
        let mut pointers: Vec<*mut c_void> = arguments.collect();
        let Grid { blocks: (x, y), threads, shared } = grid;
        // SAFETY: the caller's promise about the arguments, which the driver copies.
        let code = unsafe {
            (compiler.launch)(
                self.function,
                x,
                y,
                1,
                threads,
                1,
                1,
                shared,
                stream,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        ok(code, "launch")
    }
}

fn ok(code: c_int, what: &str) -> Result<(), TorchError> {
    match code {
        0 => Ok(()),
        code => Err(TorchError::Library {
            operation: "a kernel failed",
            message: format!("cannot {what} it (error {code})"),
        }),
    }
}
