//! Values of a hostile store.
#![cfg(feature = "tcp")]

use mooncake_transport::metadata::RpcMeta;
use mooncake_transport::wire::descriptor::Descriptor;
use proptest::prelude::*;

/// Text that is nearly a value.
fn nearly() -> impl Strategy<Value = Vec<u8>> {
    let scalar = prop_oneof![
        Just("null".to_owned()),
        Just("[]".to_owned()),
        Just("{}".to_owned()),
        any::<u64>().prop_map(|n| n.to_string()),
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| n.to_string()),
        any::<String>().prop_map(|text| format!("{text:?}")),
        "\"[a-z0-9.:\\[\\]]{0,20}\"",
    ];
    let member = prop_oneof![
        Just("ip_or_host_name"),
        Just("rpc_port"),
        Just("tcp_data_port"),
        Just("protocol"),
        Just("else")
    ];
    let members = prop::collection::vec((member, scalar), 0..6).prop_map(|members| {
        let members: Vec<_> = members
            .into_iter()
            .map(|(name, value)| format!("\"{name}\":{value}"))
            .collect();
        format!("{{{}}}", members.join(",")).into_bytes()
    });
    prop_oneof![any::<Vec<u8>>(), members]
}

proptest! {
    #[test]
    fn property_what_is_written_is_read(host in "[a-z][a-z0-9.-]{0,39}", port in 1..=u16::MAX, newline: bool) {
        let value = RpcMeta::new(&host, port).unwrap();
        let text = format!("{}{}", value.encode(), if newline { "\n" } else { "" });
        prop_assert_eq!(RpcMeta::decode(text.as_bytes()), Ok(value));
    }

    #[test]
    fn property_any_value_is_refused_or_can_be_dialled(mut bytes in nearly(), cut: prop::sample::Index) {
        for _ in 0..2 {
            if let Ok(value) = RpcMeta::decode(&bytes) {
                prop_assert!(value.port != 0 && !value.host.is_empty());
                prop_assert!(!value.host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/'));
                prop_assert_eq!(RpcMeta::decode(value.encode().as_bytes()), Ok(value));
            }
            if let Ok(descriptor) = Descriptor::decode(&bytes) {
                prop_assert!(descriptor.data_port != 0);
            }
            bytes.truncate(cut.index(bytes.len() + 1));
        }
    }
}
