//! Texts of C and back.
// Reads and writes the caller's buffers.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

/// Returns the text at `pointer`; none for null and for what is not UTF-8.
///
/// # Safety
/// `pointer` is null or leads to a text that ends with NUL and does not change while the result is used.
pub(crate) unsafe fn read<'a>(pointer: *const c_char) -> Option<&'a str> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_str().ok()
}

/// Writes `text`, cut to `room` bytes with its NUL. Writes nothing if there is no room.
///
/// # Safety
/// `room` bytes from `out` on may be written; `out` may be null if `room` is zero.
pub(crate) unsafe fn write(text: &str, out: *mut c_char, room: usize) {
    let Some(len_max) = room.checked_sub(1) else {
        return;
    };
    let bytes = &text.as_bytes()[..text.len().min(len_max)];
    // SAFETY: `bytes.len() + 1` is at most `room`, and our text is not the caller's buffer.
    unsafe {
        out.cast::<u8>()
            .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        out.add(bytes.len()).write(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_to_the_room_and_ended() {
        let check = |room: usize, expected: &[u8]| {
            let mut out = [9 as c_char; 8];
            // SAFETY: `room` is at most 8.
            unsafe { write("abc", out.as_mut_ptr(), room) };
            let out: Vec<u8> = out.iter().map(|byte| *byte as u8).collect();
            assert_eq!(out[..expected.len()], *expected, "{room}");
            assert!(
                out[expected.len()..].iter().all(|byte| *byte == 9),
                "{room}"
            );
        };
        check(0, b"");
        check(1, b"\0");
        check(3, b"ab\0");
        check(4, b"abc\0");
        check(8, b"abc\0");
    }

    #[test]
    fn null_and_what_is_not_utf_8_is_no_text() {
        // SAFETY: null, and literals that end with NUL.
        unsafe {
            assert_eq!(read(std::ptr::null()), None);
            assert_eq!(read(c"\xff".as_ptr()), None);
            assert_eq!(read(c"".as_ptr()), Some(""));
            assert_eq!(read(c"P2PHANDSHAKE".as_ptr()), Some("P2PHANDSHAKE"));
        }
    }
}
