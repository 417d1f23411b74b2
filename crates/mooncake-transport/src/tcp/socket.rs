//! Socket calls that move bytes between the kernel and registered memory without a slice.
// Raw I/O vectors into a `Memory`: a slice over bytes that a peer may write must not exist.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use slab_memory::{Memory, checked_len};

/// Sends `head` and then the bytes of `body` in one call, as many as the socket takes.
///
/// # Errors
/// The system's error. `body` outside its memory, or memory without a host pointer, is
/// `InvalidInput`; callers check both before.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    head: &[u8],
    body: Option<(&dyn Memory, Range<u64>)>,
) -> io::Result<usize> {
    let mut vectors = [
        libc::iovec {
            iov_base: head.as_ptr().cast_mut().cast(),
            iov_len: head.len(),
        },
        memory_vector(body)?,
    ];
    let message = message(&mut vectors);
    retried(|| {
        // SAFETY: the first vector borrows `head`, the second lies inside a memory that the
        // caller's borrow keeps alive and that `Memory` promises to be readable; the kernel only
        // reads both.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) }
    })
}

/// Receives into `head` and then into the bytes of `body` in one call. 0 is the end of the stream,
/// provided that there was room at all.
///
/// # Errors
/// As [`send`].
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    head: &mut [u8],
    body: Option<(&dyn Memory, Range<u64>)>,
) -> io::Result<usize> {
    let mut vectors = [
        libc::iovec {
            iov_base: head.as_mut_ptr().cast(),
            iov_len: head.len(),
        },
        memory_vector(body)?,
    ];
    let mut message = message(&mut vectors);
    retried(|| {
        // SAFETY: the first vector borrows `head` exclusively, the second lies inside a memory that
        // the caller's borrow keeps alive, that `Memory` promises to be writable and to which no
        // Rust reference exists.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, 0) }
    })
}

/// What an idle connection has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peeked {
    /// Nothing: the connection is open.
    Nothing,
    /// Bytes have arrived.
    Bytes,
    /// The peer has closed, or the connection has failed.
    Ended,
}

/// Looks at the next byte of a connection without taking it.
pub(super) fn peek(socket: BorrowedFd<'_>) -> Peeked {
    let mut byte = 0u8;
    let received = retried(|| {
        // SAFETY: one byte that lives on this stack frame.
        unsafe {
            libc::recv(
                socket.as_raw_fd(),
                (&raw mut byte).cast(),
                1,
                libc::MSG_PEEK | libc::MSG_DONTWAIT,
            )
        }
    });
    match received {
        Ok(0) => Peeked::Ended,
        Ok(_) => Peeked::Bytes,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Peeked::Nothing,
        Err(_) => Peeked::Ended,
    }
}

fn memory_vector(body: Option<(&dyn Memory, Range<u64>)>) -> io::Result<libc::iovec> {
    let Some((memory, range)) = body else {
        return Ok(libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        });
    };
    let len = checked_len(&range, memory.len())
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let base = memory.host_ptr().ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: `range.start` is at most the memory's length, all of which is mapped from `base`.
    let start = unsafe { base.as_ptr().add(range.start as usize) };
    Ok(libc::iovec {
        iov_base: start.cast(),
        // No longer than the memory, which the host can address.
        iov_len: len as usize,
    })
}

fn message(vectors: &mut [libc::iovec; 2]) -> libc::msghdr {
    // SAFETY: all-zero bytes are a `msghdr` without address, vectors and control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = vectors.len() as _;
    message
}

/// Repeats a call that a signal interrupted: readiness is only reported once, so giving up would
/// lose it.
fn retried(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use slab_memory::HostSlab;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn head_and_body_travel_in_one_call() {
        let (left, mut right) = pair();
        let slab = HostSlab::new(4096).unwrap();
        slab.copy_in(7, b"payload").unwrap();
        assert_eq!(
            send(left.as_fd(), b"head", Some((&slab, 7..14))).unwrap(),
            11
        );
        let mut bytes = [0; 11];
        right.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"headpayload");

        right.write_all(b"12345678").unwrap();
        let mut head = [0; 3];
        assert_eq!(
            receive(left.as_fd(), &mut head, Some((&slab, 100..105))).unwrap(),
            8
        );
        assert_eq!(&head, b"123");
        let mut body = [0; 5];
        slab.copy_out(100, &mut body).unwrap();
        assert_eq!(&body, b"45678");
    }

    #[test]
    fn ranges_outside_the_memory_never_reach_the_kernel() {
        let (left, _right) = pair();
        let slab = HostSlab::new(4096).unwrap();
        #[expect(
            clippy::reversed_empty_ranges,
            reason = "the reversed range is the case"
        )]
        for range in [4090..4097, 5000..5000, 10..9] {
            let error = send(left.as_fd(), b"", Some((&slab, range))).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn peeking_tells_open_from_ended_without_taking_bytes() {
        let (left, mut right) = pair();
        assert_eq!(peek(left.as_fd()), Peeked::Nothing);
        right.write_all(b"x").unwrap();
        while peek(left.as_fd()) == Peeked::Nothing {}
        assert_eq!(peek(left.as_fd()), Peeked::Bytes);
        drop(right);
        let mut byte = [0; 1];
        assert_eq!(receive(left.as_fd(), &mut byte, None).unwrap(), 1);
        while peek(left.as_fd()) == Peeked::Nothing {}
        assert_eq!(peek(left.as_fd()), Peeked::Ended);
    }
}
