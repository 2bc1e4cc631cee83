//! A client of upgraded connections: asks for one, then passes its input to it, and what comes from it to its output.
//!
//! The program `tunnel` runs this inside a client's pod; see [`Exchange`](crate::exchange::Exchange) for the test's side.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

/// The program: `tunnel ADDRESS HOST PATH`. The end of its input is the end of what it sends, and it ends when the
/// connection does. Its output begins with the head of the answer.
pub fn main(args: &[String]) -> Result<(), String> {
    let [to, host, path] = args else {
        return Err("usage: tunnel ADDRESS HOST PATH".into());
    };
    passed(to, &head(host, path)).map_err(|error| format!("{to}: {error}"))
}

/// What a WebSocket client asks; the key is that of RFC 6455 §1.3, as the answer's is not looked at.
fn head(host: &str, path: &str) -> String {
    format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
}

fn passed(to: &str, head: &str) -> io::Result<()> {
    let mut back = TcpStream::connect(to)?;
    back.set_nodelay(true)?;
    back.write_all(head.as_bytes())?;
    let mut forth = back.try_clone()?;
    // Not waited for: the input may stay open when the connection has ended.
    thread::spawn(move || {
        let copied = copy(&mut io::stdin(), &mut forth);
        copied.and_then(|()| forth.shutdown(Shutdown::Write))
    });
    copy(&mut back, &mut io::stdout())
}

/// Passes on whatever comes as soon as it does, whole lines or not.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        match from.read(&mut bytes)? {
            0 => return Ok(()),
            count => to.write_all(&bytes[..count]).and_then(|()| to.flush())?,
        }
    }
}
