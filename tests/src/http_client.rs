//! A plain HTTP/1.1 client over ordinary sockets.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use crate::wait::WAIT_TIMEOUT;

/// Response to one request.
#[derive(Clone, Debug, Default)]
pub struct ClientResponse {
    /// Status code of the response.
    pub status: u16,
    /// Headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body of the response as text.
    pub body: String,
}

impl ClientResponse {
    /// Value of a header; empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        let header_line = self.headers.iter().find(|(header, _)| header == name);
        header_line.map(|(_, value)| value.as_str()).unwrap_or_default()
    }
}

/// A connection that can carry several requests.
#[derive(Debug)]
pub struct PlainHttpClient {
    stream: TcpStream,
    buffered: Vec<u8>,
}

impl PlainHttpClient {
    /// Connects to an address, with a timeout for each later read.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, WAIT_TIMEOUT)?;
        stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffered: Vec::new() })
    }

    /// Local address of the connection, as the kernel chose it.
    pub fn local_ip(&self) -> String {
        self.stream.local_addr().map(|address| address.ip().to_string()).unwrap_or_default()
    }

    /// Local and remote address of the connection, as text.
    pub fn addresses(&self) -> String {
        let text = |it: io::Result<SocketAddr>| it.map(|it| it.to_string()).unwrap_or_default();
        format!("{} to {}", text(self.stream.local_addr()), text(self.stream.peer_addr()))
    }

    /// Sends raw bytes on the connection.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends one request without a body and reads the response.
    pub fn get(&mut self, host: &str, path: &str) -> io::Result<ClientResponse> {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())?;
        self.read_response()
    }

    /// Returns true if the peer has closed or reset the connection, a check that pools make before they use one
    /// again.
    pub fn is_closed(&self) -> bool {
        let looked = self.stream.set_nonblocking(true).and_then(|()| self.stream.peek(&mut [0]));
        let waits = looked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        !waits || self.stream.set_nonblocking(false).is_err()
    }

    /// Reads one response from the connection.
    pub fn read_response(&mut self) -> io::Result<ClientResponse> {
        let invalid_data = || io::Error::new(io::ErrorKind::InvalidData, "no HTTP/1.1 response");
        let head = loop {
            let head_end = self.buffered.windows(4).position(|window| window == b"\r\n\r\n");
            match head_end {
                Some(head_end) => break self.buffered.drain(..head_end + 4).collect::<Vec<u8>>(),
                None => self.read_more()?,
            }
        };
        let head = String::from_utf8(head).map_err(|_text| invalid_data())?;
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        let headers = lines.filter_map(header).collect();
        let mut response = ClientResponse {
            status: status.ok_or_else(invalid_data)?,
            headers,
            body: String::new(),
        };
        let body = match response.header("content-length").parse::<usize>() {
            Ok(length) => {
                while self.buffered.len() < length {
                    self.read_more()?;
                }
                self.buffered.drain(..length).collect()
            }
            // The test applications send no chunked responses; one without a length lasts until the close.
            Err(_) => {
                self.stream.read_to_end(&mut self.buffered)?;
                std::mem::take(&mut self.buffered)
            }
        };
        response.body = String::from_utf8_lossy(&body).into_owned();
        Ok(response)
    }

    fn read_more(&mut self) -> io::Result<()> {
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.buffered.extend_from_slice(&bytes[..count]);
                Ok(())
            }
        }
    }
}

/// Sends one request on a new connection.
pub fn get(address: SocketAddr, host: &str, path: &str) -> io::Result<ClientResponse> {
    PlainHttpClient::connect(address)?.get(host, path)
}

/// Sends raw bytes on a new connection and returns all data up to its end.
pub fn send_raw(address: SocketAddr, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut client = PlainHttpClient::connect(address)?;
    client.stream.write_all(bytes)?;
    let mut back = Vec::new();
    client.stream.read_to_end(&mut back)?;
    Ok(back)
}
