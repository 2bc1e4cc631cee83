//! A client of upgraded connections and of raw TCP: it opens one, sends its input there, and prints the received data.
//!
//! The executable `tunnel` runs this inside a client's pod; the test's side is
//! [`StreamingExchange`](crate::streaming_exchange::StreamingExchange).

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

/// Runs the program `tunnel ADDRESS [HOST PATH]`. At the end of its input it shuts down its sending side; it ends with
/// the connection. Its output begins with the head of the response. Without host and path it requests nothing: the
/// connection is raw TCP.
pub fn main(args: &[String]) -> Result<(), String> {
    let (address, head) = match args {
        [address] => (address, String::new()),
        [address, host, path] => (address, head(host, path)),
        _ => return Err("usage: tunnel ADDRESS [HOST PATH]".into()),
    };
    run_tunnel(address, &head).map_err(|error| format!("{address}: {error}"))
}

/// Request of a WebSocket client, with the key of RFC 6455 §1.3, because the response's key is not checked.
fn head(host: &str, path: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
}

fn run_tunnel(address: &str, head: &str) -> io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.write_all(head.as_bytes())?;
    let mut sending_half = stream.try_clone()?;
    // Not joined: the input may stay open after the connection has ended.
    thread::spawn(move || {
        let copied = copy(&mut io::stdin(), &mut sending_half);
        copied.and_then(|()| sending_half.shutdown(Shutdown::Write))
    });
    copy(&mut stream, &mut io::stdout())
}

/// Passes on data as soon as it arrives, without waiting for whole lines.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        match from.read(&mut bytes)? {
            0 => return Ok(()),
            count => to.write_all(&bytes[..count]).and_then(|()| to.flush())?,
        }
    }
}
