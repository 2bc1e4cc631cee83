//! Certificate files of one test: a pair, a folder of pairs, and the authority that signs all of them.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use common::fixtures::certificates::{TestAuthority, TestCertificate};
use serde_json::json;

/// Folder of the pairs besides the first one, below the folder of the test.
const FOLDER: &str = "folder";

/// Certificate files in a folder of a test, in PEM.
pub struct TlsFiles {
    folder: PathBuf,
    names: Vec<String>,
    /// Intermediate authority: clients need it behind each certificate to verify the chain.
    issuer: TestAuthority,
}

impl fmt::Debug for TlsFiles {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = out.debug_struct("TlsFiles");
        fields.field("folder", &self.folder).field("names", &self.names).finish_non_exhaustive()
    }
}

impl TlsFiles {
    /// Makes an authority, and a pair for hosts with these names. The folder must exist.
    pub fn new(folder: &Path, names: &[&str]) -> Self {
        let authority = TestAuthority::new();
        let files = Self {
            folder: folder.to_owned(),
            names: names.iter().map(|&name| name.to_owned()).collect(),
            issuer: authority.intermediate(),
        };
        fs::create_dir_all(files.folder()).expect("a folder");
        fs::write(files.authority(), authority.certificate_pem()).expect("a file");
        files.renew();
        files
    }

    /// Replaces both files of the pair by a new certificate with its key, each by a rename.
    pub fn renew(&self) {
        let pair = self.issue();
        replace_file(&self.certificate(), &pair.chain_pem);
        replace_file(&self.key(), &pair.key_pem);
    }

    /// Replaces the file of the key by one that cannot be read.
    pub fn break_key(&self) {
        replace_file(&self.key(), "no key\n");
    }

    /// Adds a pair for hosts with these names to the folder of pairs, and returns the path of its certificate.
    pub fn add_pair(&self, name: &str, hosts: &[&str]) -> PathBuf {
        let pair = self.issuer.issue(hosts);
        let certificate = self.folder().join(format!("{name}.crt"));
        replace_file(&certificate, &pair.chain_pem);
        replace_file(&self.folder().join(format!("{name}.key")), &pair.key_pem);
        certificate
    }

    /// Issues another certificate with the names of the pair, and writes it to no file.
    pub fn issue(&self) -> TestCertificate {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        self.issuer.issue(&names)
    }

    /// Path of the certificate of the authority that clients trust.
    pub fn authority(&self) -> PathBuf {
        self.folder.join("authority.pem")
    }

    /// Path of the certificate of the pair.
    pub fn certificate(&self) -> PathBuf {
        self.folder.join("pair.crt")
    }

    /// Path of the key of the pair.
    pub fn key(&self) -> PathBuf {
        self.folder.join("pair.key")
    }

    /// Path of the folder of further pairs.
    pub fn folder(&self) -> PathBuf {
        self.folder.join(FOLDER)
    }
}

/// Manifest of a Secret of the type `kubernetes.io/tls`, in JSON.
pub fn tls_secret(name: &str, certificate: &str, key: &str) -> String {
    let secret = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": name },
        "type": "kubernetes.io/tls",
        "stringData": { "tls.crt": certificate, "tls.key": key },
    });
    secret.to_string()
}

/// First certificate of a text in PEM, in base64 without line ends, to compare it with one that a server sent. `None`:
/// the text has none.
pub fn first_certificate(pem: &str) -> Option<String> {
    let (_, rest) = pem.split_once("-----BEGIN CERTIFICATE-----")?;
    let (base64, _) = rest.split_once("-----END CERTIFICATE-----")?;
    Some(base64.split_whitespace().collect())
}

/// First certificate of a file, in base64 without line ends.
pub fn certificate_in(file: &Path) -> String {
    let pem = fs::read_to_string(file).expect("a file of the test");
    first_certificate(&pem).expect("a certificate in PEM")
}

/// Writes a file aside and renames it, as programs that renew certificates do: no reader sees half of it.
fn replace_file(file: &Path, text: &str) {
    let new = file.with_extension("new");
    fs::write(&new, text).expect("a file");
    fs::rename(&new, file).expect("a file");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_certificate_of_a_text_is_compared_without_line_ends() {
        let pem = "depth=0\r\n-----BEGIN CERTIFICATE-----\r\nMIIB\r\nAQAB\r\n-----END CERTIFICATE-----\r\n\
                   -----BEGIN CERTIFICATE-----\nother\n-----END CERTIFICATE-----\n";
        assert_eq!(first_certificate(pem).as_deref(), Some("MIIBAQAB"));
        assert_eq!(first_certificate("no peer certificate available"), None);
    }
}
