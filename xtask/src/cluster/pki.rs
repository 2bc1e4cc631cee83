//! Shell: certificates of the cluster, created once for the highest number of nodes.

use std::{fs, os::unix::fs::OpenOptionsExt as _, path::Path};

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use super::{
    addresses::{CONTROL_PLANE, KUBERNETES, node_addresses},
    plan::MAX_NODES,
};

/// Subject of a certificate: file name, common name, group, and the names and addresses of a server.
struct CertificateSubject<'a> {
    file: String,
    common_name: String,
    group: &'a str,
    alt_names: Vec<String>,
}

/// Writes all keys and certificates to `folder`.
pub(crate) fn write(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, "rouse test cluster");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let authority = params.self_signed(&key)?;
    write_pem(folder, "ca.crt", &authority.pem())?;
    write_pem(folder, "ca.key", &key.serialize_pem())?;
    let issuer = Issuer::new(params, key);
    for subject in subjects() {
        sign(folder, &subject, &issuer)?;
    }
    // Tokens of service accounts need a key pair only, no certificate.
    let accounts = KeyPair::generate()?;
    write_pem(folder, "service-account.key", &accounts.serialize_pem())?;
    write_pem(folder, "service-account.pub", &accounts.public_key_pem())
}

fn subjects() -> Vec<CertificateSubject<'static>> {
    let user = |file: &str, name: &str, group| CertificateSubject {
        file: file.to_owned(),
        common_name: name.to_owned(),
        group,
        alt_names: Vec::new(),
    };
    let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"];
    let names =
        names.into_iter().chain(["kubernetes.default.svc.cluster.local", "127.0.0.1", "::1"]);
    let mut subjects = vec![
        user("admin", "admin", "system:masters"),
        user("kube-controller-manager", "system:kube-controller-manager", ""),
        user("kube-scheduler", "system:kube-scheduler", ""),
        user("kube-proxy", "system:kube-proxy", ""),
        user("apiserver-kubelet-client", "kube-apiserver", "system:masters"),
        user("front-proxy-client", "front-proxy-client", ""),
        CertificateSubject {
            alt_names: names.chain(CONTROL_PLANE).chain(KUBERNETES).map(str::to_owned).collect(),
            ..user("apiserver", "kube-apiserver", "")
        },
    ];
    // Certificates for all possible nodes, so that a node can be added without signing again.
    for node in 1..=MAX_NODES {
        let name = format!("system:node:node{node}");
        // The API server's Node authorizer requires exactly this name and group.
        subjects.push(user(&format!("node{node}"), &name, "system:nodes"));
        let alt_names = node_addresses(node).into_iter().chain([format!("node{node}")]).collect();
        let file = format!("node{node}-serving");
        subjects.push(CertificateSubject { alt_names, ..user(&file, &name, "system:nodes") });
    }
    subjects
}

fn sign(
    folder: &Path,
    subject: &CertificateSubject<'_>,
    issuer: &Issuer<'_, KeyPair>,
) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(subject.alt_names.clone())?;
    params.distinguished_name.push(DnType::CommonName, subject.common_name.as_str());
    if !subject.group.is_empty() {
        params.distinguished_name.push(DnType::OrganizationName, subject.group);
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Only servers have names that a client checks.
    params.extended_key_usages = match subject.alt_names.is_empty() {
        true => vec![ExtendedKeyUsagePurpose::ClientAuth],
        false => vec![ExtendedKeyUsagePurpose::ServerAuth],
    };
    let certificate = params.signed_by(&key, issuer)?;
    write_pem(folder, &format!("{}.crt", subject.file), &certificate.pem())?;
    write_pem(folder, &format!("{}.key", subject.file), &key.serialize_pem())
}

fn write_pem(folder: &Path, name: &str, text: &str) -> Result<()> {
    use std::io::Write as _;
    let path = folder.join(name);
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
