//! What a pipe sends: notices and answers of several frames, and the images of tensors. What is decoded names bytes
//! that can exist and encodes to what decodes alike.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_transport::pipe::frame::{Answer, ImageHead, Notice, head_len};
use slab_fuzz::within_reach_of;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else {
        return;
    };
    if first & 1 == 0 {
        check_message(&frames(first, rest));
    } else {
        check_image(rest);
    }
});

/// Some frames of eight bytes, and one of what is left; the first one may have three, as the word of an answer has.
fn frames(layout: u8, mut rest: &[u8]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for index in 0..layout >> 1 & 3 {
        let len = if index == 0 && layout & 0x10 != 0 {
            3
        } else {
            8
        };
        let (frame, behind) = rest.split_at(rest.len().min(len));
        frames.push(frame.to_vec());
        rest = behind;
    }
    if layout & 0x20 == 0 {
        frames.push(rest.to_vec());
    }
    frames
}

fn check_message(frames: &[Vec<u8>]) {
    let len = frames.iter().map(Vec::len).sum();
    if let Ok(notice) = within_reach_of(len, || Notice::decode(frames)) {
        assert!(notice.address.checked_add(notice.len).is_some());
        assert!(matches!(frames.len(), 2 | 3));
        assert_eq!(notice.note.is_some(), frames.len() == 3);
        let again = notice.encode();
        assert_eq!(again[..2], frames[..2]);
        assert_eq!(Notice::decode(&again), Ok(notice));
    }
    if let Ok(answer) = within_reach_of(len, || Answer::decode(frames)) {
        assert_eq!(answer.encode(), frames);
    }
}

/// Eight bytes say how long the image is, and the rest starts it.
fn check_image(bytes: &[u8]) {
    let Some((image_len, image)) = bytes.split_first_chunk() else {
        return;
    };
    let image_len = u64::from_le_bytes(*image_len);
    let Some((prefix, behind)) = image.split_first_chunk() else {
        return;
    };
    let Ok(len) = head_len(*prefix, image_len) else {
        return;
    };
    assert!(len as u64 + 8 <= image_len);
    let header = &behind[..len.min(behind.len())];
    let Ok(head) = within_reach_of(header.len(), || ImageHead::decode(header, image_len)) else {
        return;
    };
    assert_eq!(head.image_len(), image_len);
    let bits = head
        .shape
        .iter()
        .try_fold(head.dtype.bits(), |bits, dim| bits.checked_mul(*dim));
    if let Some(bits) = bits {
        assert_eq!(head.data_len.checked_mul(8), Some(bits));
    }

    // Written again the header may be longer, and then the end may be beyond the address space.
    let Ok(written) = ImageHead::new(head.dtype, &head.shape) else {
        return;
    };
    let encoded = written.encode();
    assert_eq!(encoded.len() as u64, written.data_start);
    assert_eq!(encoded.len() % 8, 0);
    let (prefix, header) = encoded.split_first_chunk().expect("the length");
    assert_eq!(head_len(*prefix, written.image_len()), Ok(header.len()));
    assert_eq!(
        ImageHead::decode(header, written.image_len()).as_ref(),
        Ok(&written)
    );
    assert_eq!((written.dtype, &written.shape), (head.dtype, &head.shape));
    assert_eq!(written.data_len, head.data_len);
}
