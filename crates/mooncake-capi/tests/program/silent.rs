//! A peer that tells where its data port is, takes connections there and neither reads nor answers.

use std::io::{Read, Write};
use std::net::TcpListener;

pub(crate) struct SilentPeer {
    session: String,
    _data: TcpListener,
}

impl SilentPeer {
    pub(crate) fn start() -> Self {
        // The kernel accepts connections up to its backlog, and nobody reads them.
        let data = TcpListener::bind("127.0.0.1:0").unwrap();
        let control = TcpListener::bind("127.0.0.1:0").unwrap();
        let session = control.local_addr().unwrap().to_string();
        let descriptor = format!(
            r#"{{"buffers":[],"name":"{session}","protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":{},"tcp_proto_version":2,"timestamp":""}}"#,
            data.local_addr().unwrap().port()
        );
        // Ends with the process; it holds nothing but the listener.
        std::thread::spawn(move || {
            for mut stream in control.incoming().map_while(Result::ok) {
                let mut head = [0; 8];
                if stream.read_exact(&mut head).is_err() {
                    continue;
                }
                let mut body = vec![0; usize::try_from(u64::from_le_bytes(head)).unwrap()];
                if stream.read_exact(&mut body).is_err() {
                    continue;
                }
                let mut reply = (descriptor.len() as u64 + 1).to_le_bytes().to_vec();
                reply.push(body[0]);
                reply.extend(descriptor.as_bytes());
                let _ = stream.write_all(&reply);
            }
        });
        Self {
            session,
            _data: data,
        }
    }

    pub(crate) fn session(&self) -> &str {
        &self.session
    }
}
