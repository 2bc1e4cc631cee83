//! Shell: pages that a component serves at its admin port, read over a connection of this machine.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

/// Response to a request for a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AdminPage {
    /// Status code of HTTP.
    pub(crate) status: u16,
    /// Text of the page.
    pub(crate) body: String,
}

/// Gets a page. Each wait for the component ends after `timeout`.
pub(crate) fn get_page(
    address: SocketAddr,
    path: &str,
    timeout: Duration,
) -> io::Result<AdminPage> {
    let mut stream = TcpStream::connect_timeout(&address, timeout)?;
    // A component that hangs must not hang the command too.
    stream.set_read_timeout(Some(timeout))?;
    // In version 1.0 the response is never chunked.
    let head = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    parse_response(&text).ok_or_else(|| io::Error::other("the response is not HTTP"))
}

fn parse_response(text: &str) -> Option<AdminPage> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status_line = head.lines().next().filter(|line| line.starts_with("HTTP/1."))?;
    let status = status_line.split(' ').nth(1)?.parse().ok()?;
    Some(AdminPage { status, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_has_its_status_and_its_text() {
        let text = "HTTP/1.0 503 Service Unavailable\r\ncontent-length: 3\r\n\r\na\r\n\r\nb";
        let page = AdminPage { status: 503, body: "a\r\n\r\nb".into() };
        assert_eq!(parse_response(text), Some(page));
        for bad in ["", "HTTP/1.1 200 OK\r\n", "SSH-2.0\r\n\r\n", "HTTP/1.1 ok\r\n\r\n"] {
            assert_eq!(parse_response(bad), None, "{bad:?}");
        }
    }
}
