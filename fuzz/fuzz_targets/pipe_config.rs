//! A pipe's configuration: what is accepted can be used, reads alike when it is written anew, and a plan of its ports
//! has no port twice on one host.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use mooncake_transport::pipe::{MetadataBackend, PipeConfig, PortPlan, Role};
use serde_json::{Value, json};
use slab_fuzz::within_reach_of;

fuzz_target!(|text: &[u8]| {
    let Ok(config) = within_reach_of(text.len(), || PipeConfig::from_json(text)) else {
        return;
    };
    assert!(!config.metadata_server().is_empty());
    let backend = config.metadata_backend().map(|backend| match backend {
        MetadataBackend::Etcd => "etcd",
        MetadataBackend::Redis => "redis",
        _ => panic!("a store this target does not know"),
    });
    let again = json!({
        "prefill_url": config.side(Role::Prefill).to_string(),
        "decode_url": config.side(Role::Decode).to_string(),
        "metadata_server": config.metadata_server(),
        "metadata_backend": backend,
        "protocol": config.protocol(),
        "device_name": config.device_name(),
    });
    assert_eq!(
        PipeConfig::from_json(again.to_string().as_bytes()).as_ref(),
        Ok(&config)
    );
    // Laid out otherwise, the text says the same.
    let value: Value = serde_json::from_slice(text).expect("it was read as JSON");
    let spread = serde_json::to_vec_pretty(&value).expect("it was JSON");
    assert_eq!(PipeConfig::from_json(&spread).as_ref(), Ok(&config));

    for ranks in [1, 2, 9] {
        if let Ok(plan) = PortPlan::new(&config, ranks) {
            check_plan(&config, &plan, ranks);
        }
    }
});

fn check_plan(config: &PipeConfig, plan: &PortPlan, ranks: u16) {
    let mut taken = HashSet::new();
    for role in [Role::Prefill, Role::Decode] {
        let host = config.side(role).host();
        for rank in 0..ranks {
            let ports = plan.ports(role, rank).expect("a rank of the plan");
            for port in [ports.engine, ports.notices, ports.answers] {
                assert!(taken.insert((host, port)), "{host}:{port} twice");
            }
        }
        assert!(plan.ports(role, ranks).is_none());
    }
}
