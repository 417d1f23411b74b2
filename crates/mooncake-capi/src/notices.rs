//! Lists of notifications that were handed to the caller.
// Gives out pointers to texts, and takes them back.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use mooncake_sys::NotifyMsg;
use mooncake_transport::wire::control::Notice;

/// What one call handed out: the array and the texts that it pointed to. The caller may have changed
/// either, so that only addresses and lengths noted here are used to give them back.
struct List {
    array: *mut [NotifyMsg],
    texts: Vec<*mut [u8]>,
}

// SAFETY: the pointers are owned by the list and not tied to a thread.
unsafe impl Send for List {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: all came from `Box::into_raw` in `hand_out` and are given back once, here.
        unsafe {
            drop(Box::from_raw(self.array));
            for text in self.texts.drain(..) {
                drop(Box::from_raw(text));
            }
        }
    }
}

/// The lists that are with the caller, by the address of their array.
fn lists() -> MutexGuard<'static, HashMap<usize, List>> {
    static LISTS: OnceLock<Mutex<HashMap<usize, List>>> = OnceLock::new();
    LISTS
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Hands out the notifications; null and zero if there are none.
pub(crate) fn hand_out(notices: Vec<Notice>) -> (*mut NotifyMsg, c_int) {
    let Ok(count) = c_int::try_from(notices.len()) else {
        return (std::ptr::null_mut(), 0);
    };
    if count == 0 {
        return (std::ptr::null_mut(), 0);
    }
    let mut texts = Vec::with_capacity(2 * notices.len());
    let mut lend = |text: String| {
        let text = Box::into_raw(with_nul(text));
        texts.push(text);
        text.cast::<c_char>()
    };
    let array: Box<[NotifyMsg]> = notices
        .into_iter()
        .map(|notice| NotifyMsg {
            name: lend(notice.name),
            msg: lend(notice.message),
        })
        .collect();
    let array = Box::into_raw(array);
    let pointer = array.cast::<NotifyMsg>();
    lists().insert(pointer.addr(), List { array, texts });
    (pointer, count)
}

/// Takes a list back. False if it is none that is with the caller, or has another length.
pub(crate) fn take_back(pointer: *mut NotifyMsg, count: c_int) -> bool {
    if pointer.is_null() {
        return count == 0;
    }
    let mut lists = lists();
    let matches = lists
        .get(&pointer.addr())
        .is_some_and(|list| c_int::try_from(list.array.len()) == Ok(count));
    matches && lists.remove(&pointer.addr()).is_some()
}

/// The text up to its first NUL, which is where C sees its end, and a NUL.
fn with_nul(mut text: String) -> Box<[u8]> {
    text.truncate(text.find('\0').unwrap_or(text.len()));
    text.push('\0');
    text.into_bytes().into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_list_is_readable_until_it_is_taken_back_once() {
        let notice = |name: &str, message: &str| Notice {
            name: name.to_owned(),
            message: message.to_owned(),
        };
        let (list, count) = hand_out(vec![notice("a", "one"), notice("b", "tw\0o")]);
        assert_eq!(count, 2);
        // SAFETY: the list has two entries, whose texts end with NUL.
        let second = unsafe { CStr::from_ptr((*list.add(1)).msg) };
        assert_eq!(second, c"tw");
        assert!(!take_back(list, 1));
        assert!(take_back(list, 2));
        assert!(!take_back(list, 2));
        assert!(!take_back(std::ptr::without_provenance_mut(64), 1));
    }

    #[test]
    fn no_notifications_are_null() {
        assert_eq!(hand_out(Vec::new()), (std::ptr::null_mut(), 0));
        assert!(take_back(std::ptr::null_mut(), 0));
        assert!(!take_back(std::ptr::null_mut(), 1));
    }
}
