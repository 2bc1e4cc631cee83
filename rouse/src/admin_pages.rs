//! Shell: pages that a component serves at its admin port, read over a connection of this machine.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use common::decimal::parse_digits;

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
    parse_response(&text).map_err(io::Error::other)
}

/// Reads a response. Errors: it is not HTTP, or the connection has ended before its body.
fn parse_response(text: &str) -> Result<AdminPage, &'static str> {
    let (page, body_bytes) = parse_parts(text).ok_or("the response is not HTTP")?;
    // A component that ends, or has waited too long for the reader, leaves the rest out.
    if body_bytes.is_some_and(|bytes| page.body.len() < bytes) {
        return Err("the response is not complete");
    }
    Ok(page)
}

/// Splits a response into its page and the length that its head names for the body.
fn parse_parts(text: &str) -> Option<(AdminPage, Option<usize>)> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status_line = lines.next().filter(|line| line.starts_with("HTTP/1."))?;
    let status = parse_digits(status_line.split(' ').nth(1)?)?;
    let mut fields = lines.filter_map(|line| line.split_once(':'));
    let length = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let body_bytes = length.and_then(|(_, value)| parse_digits(value.trim()));
    Some((AdminPage { status, body: body.to_owned() }, body_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_has_its_status_and_its_text() {
        let text = "HTTP/1.0 503 Service Unavailable\r\ncontent-length: 6\r\n\r\na\r\n\r\nb";
        let page = AdminPage { status: 503, body: "a\r\n\r\nb".into() };
        assert_eq!(parse_response(text), Ok(page));
        for bad in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "SSH-2.0\r\n\r\n",
            "HTTP/1.1 ok\r\n\r\n",
            "HTTP/1.1 +200 OK\r\n\r\n",
        ] {
            assert_eq!(parse_response(bad), Err("the response is not HTTP"), "{bad:?}");
        }
    }

    #[test]
    fn a_response_that_breaks_off_is_no_page() {
        let text = "HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n{\"a\": 1}";
        assert_eq!(parse_response(text), Err("the response is not complete"));
        let whole = parse_response(&text.replace('9', "8")).expect("a page");
        assert_eq!(whole.body, "{\"a\": 1}");
        let without_length = parse_response("HTTP/1.0 200 OK\r\n\r\n{").expect("a page");
        assert_eq!(without_length.body, "{");
    }
}
