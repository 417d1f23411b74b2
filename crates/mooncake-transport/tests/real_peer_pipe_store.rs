//! A pipe of ours and one of the old kind that find each other in Mooncake's HTTP metadata server, as old pipes were configured.
#![cfg(all(
    feature = "pipe",
    feature = "http",
    feature = "etcd",
    feature = "redis"
))]

#[path = "peer/harness.rs"]
mod harness;
mod pipe_support;
#[path = "peer/servers.rs"]
mod servers;

use harness::process::Process;
use mooncake_transport::pipe::{Pipe, PipeConfig, Role};
use pipe_support::{LONG, assert_receives, free_bases, options, send};
use serde_json::json;
use servers::{Kind, Server};

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn an_old_pipe_and_ours_find_each_other_in_a_store_by_their_configured_names() {
    let server = Server::start(Kind::Http);
    for role in [Role::Prefill, Role::Decode] {
        let bases = free_bases();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe.json");
        let text = json!({
            "prefill_url": format!("127.0.0.1:{}", bases.0),
            "decode_url": format!("127.0.0.1:{}", bases.1),
            "metadata_server": server.address(),
        });
        std::fs::write(&path, text.to_string()).unwrap();
        let variables = [("MOONCAKE_CONFIG_PATH", path.as_os_str())];
        let mut peer = Process::start("pipe_peer.py", variables);
        let (own, kv_rank) = match role {
            Role::Prefill => (bases.0, 1),
            _ => (bases.1, 0),
        };
        let started = peer.call(json!({"do": "start", "kv_rank": kv_rank}));
        assert_eq!(started["code"], 0, "{started}");
        // No session is passed on: the store knows both under the names of the configuration.
        let config = PipeConfig::from_json(text.to_string().as_bytes()).unwrap();
        let mut pipe = Pipe::start(&config, role, 0, options()).unwrap();
        for seed in 0..5 {
            let len = 100_000 + seed as usize;
            peer.call(json!({"do": "send", "dtype": "U8", "shape": [len], "seed": seed}));
            assert_receives(&mut pipe, seed, len);
            send(&mut pipe, seed + 100, len).unwrap();
            let received = peer.call(json!({"do": "recv", "seed": seed + 100}));
            assert_eq!(received["equal"], true, "{received}");
        }
        let answers = peer.call(json!({"do": "flush"}));
        assert_eq!(answers["answers"], json!(vec!["ACK"; 5]));
        pipe.close(LONG).unwrap();
        let name = format!("mooncake/rpc_meta/127.0.0.1:{own}");
        assert_eq!(server.store().exists(&name), Ok(false));
    }
}
