//! Servers that answer as a test says.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// Serves every connection in turn with `serve`.
pub(crate) fn server(mut serve: impl FnMut(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            serve(stream);
        }
    });
    address
}

/// Serves every HTTP request in turn with `serve`, which gets its head and its body.
pub(crate) fn web_server(
    mut serve: impl FnMut(TcpStream, String, Vec<u8>) + Send + 'static,
) -> SocketAddr {
    server(move |mut stream| {
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let len = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "));
        let mut body = vec![0; len.map_or(0, |len| len.parse().unwrap())];
        stream.read_exact(&mut body).unwrap();
        serve(stream, head, body);
    })
}

/// A server that reads nothing and says nothing.
pub(crate) fn silent_server() -> SocketAddr {
    server(|stream| {
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(5));
            drop(stream);
        });
    })
}

/// A server that takes a request, if it is given time to, and hangs up without an answer.
pub(crate) fn closing_server() -> SocketAddr {
    web_server(|stream, _, _| drop(stream))
}

/// An address where nobody listens.
pub(crate) fn nobody() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}
