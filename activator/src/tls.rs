//! Shell: certificates of hosts at the gateway, the choice of one for each handshake, and authorities of client
//! certificates.
//!
//! A module belongs here if it holds certificates of hosts, chooses one, or holds authorities of client certificates. Connections and handshakes belong to higher
//! layers. Mutual TLS between components is in `common`.
//!
//! | module | subject |
//! |---|---|
//! | [`certificate_choice`] | pure: choice of the certificate for a handshake |
//! | [`certificate_snapshot`] | pure: certificates in force without their keys, for pages |
//! | [`held_certificate`] | pure: certificate in force of one Secret or file, and its replacement |
//! | [`client_hello`] | pure: host that a client names in its first message |
//! | [`watched_files`] | pure: certificate files as the last looks have found them |
//! | [`server_config`] | TLS settings of one certificate |
//! | [`client_cas`] | authorities of client certificates in force |
//! | [`host_certificates`] | all certificates in force |
//! | [`certificate_files`] | certificate files of the command line |

pub mod certificate_choice;
pub mod certificate_files;
pub mod certificate_snapshot;
pub mod client_cas;
pub mod client_hello;
pub mod held_certificate;
pub mod host_certificates;
pub mod server_config;
pub mod watched_files;
