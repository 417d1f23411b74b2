//! Descriptors of segments: what is decoded can be used and encodes to what decodes alike, whatever sizes and
//! numbers the text names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_transport::wire::descriptor::{
    BufferRange, Descriptor, DescriptorError, encoded_buffer_len,
};
use slab_fuzz::within_reach_of;

fuzz_target!(|text: &[u8]| {
    let Ok(mut descriptor) = within_reach_of(text.len(), || Descriptor::decode(text)) else {
        return;
    };
    assert_ne!(descriptor.data_port, 0);
    assert_ne!(descriptor.data_host.as_deref(), Some(""));
    for buffer in &descriptor.buffers {
        assert!(buffer.address != 0 && buffer.len != 0, "{buffer:?}");
    }

    // Buffers are published under the name of their segment, and one without a name counts for nothing.
    if descriptor.name.is_empty() && !descriptor.buffers.is_empty() {
        assert_eq!(
            Descriptor::decode(descriptor.encode().as_bytes()),
            Err(DescriptorError::Buffer { index: 0 })
        );
        descriptor.name = "h:1".into();
    }
    let encoded = descriptor.encode();
    let again = Descriptor::decode(encoded.as_bytes());
    assert_eq!(again.as_ref(), Ok(&descriptor));

    // What follows the document is another's.
    let followed = format!("{encoded}\n\0{{");
    assert_eq!(
        Descriptor::decode(followed.as_bytes()).as_ref(),
        Ok(&descriptor)
    );
    // A part of it is no descriptor.
    assert!(Descriptor::decode(&encoded.as_bytes()[..encoded.len() - 1]).is_err());

    if !descriptor.name.is_empty() && !descriptor.buffers.is_empty() {
        let more = BufferRange {
            address: u64::MAX,
            len: text.len() as u64 + 1,
        };
        let grown = encoded_buffer_len(&descriptor.name, more);
        descriptor.buffers.push(more);
        assert_eq!(descriptor.encode().len(), encoded.len() + grown);
    }
});
