//! How many of the bytes that a socket has sent have not arrived at the other kernel.
#![allow(unsafe_code)]

use std::net::TcpStream;

use rustix::ffi::c_int;
use rustix::ioctl::{Getter, Opcode, ioctl};

/// Linux's `SIOCOUTQ`.
const SIOCOUTQ: Opcode = 0x5411;

/// Bytes that were written and that the other kernel has not acknowledged; `None` if the system does not say.
pub(super) fn num_outstanding(stream: &TcpStream) -> Option<usize> {
    // SAFETY: SIOCOUTQ writes one `int`, which is what this getter has room for.
    let outcome = unsafe { ioctl(stream, Getter::<SIOCOUTQ, c_int>::new()) };
    usize::try_from(outcome.ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn what_the_other_kernel_has_is_not_outstanding() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(b"hello").unwrap();
        far.read_exact(&mut [0; 5]).unwrap();
        assert_eq!(num_outstanding(&near), Some(0));
        // More than the other kernel accepts.
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 1 << 16]).is_ok() {}
        std::thread::sleep(Duration::from_millis(50));
        assert!(num_outstanding(&near).unwrap() > 0);
    }
}
