//! Shell: a protocol of bytes in which the server speaks first, as in those of many databases and mail servers.

use std::{io, net::SocketAddr};

use tokio::{io::AsyncWriteExt as _, net::TcpStream};

/// Greets the client by `Hello from POD to PEER`, then echoes its bytes. Closes after the client's last byte, so that a
/// client that ends its input first still gets all of them.
pub(crate) async fn greet_and_echo(
    mut stream: TcpStream,
    peer: SocketAddr,
    pod: &str,
) -> io::Result<()> {
    // Small parts would otherwise wait for the client's delayed acknowledgement.
    stream.set_nodelay(true)?;
    let peer = peer.ip().to_canonical();
    stream.write_all(format!("Hello from {pod} to {peer}\n").as_bytes()).await?;
    let (mut reader, mut writer) = stream.split();
    tokio::io::copy(&mut reader, &mut writer).await?;
    writer.shutdown().await
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::{io::AsyncReadExt as _, net::TcpListener};

    use super::*;

    #[tokio::test]
    async fn the_server_speaks_first_and_echoes_what_comes_before_the_clients_end() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = async {
            let (stream, peer) = listener.accept().await.unwrap();
            greet_and_echo(stream, peer, "a-pod").await.unwrap();
        };
        let ask = async {
            let mut client = TcpStream::connect(address).await.unwrap();
            let mut greeting = [0; 29];
            client.read_exact(&mut greeting).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&greeting), "Hello from a-pod to 127.0.0.1");
            client.write_all(b"first, second").await.unwrap();
            client.shutdown().await.unwrap();
            let mut rest = String::new();
            client.read_to_string(&mut rest).await.unwrap();
            assert_eq!(rest, "\nfirst, second");
        };
        tokio::join!(serve, ask);
    }
}
