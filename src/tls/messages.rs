//! Messages for the errors of rustls. Each says what is wrong and, where that is known, what to do.
//!
//! Begin at `describe_certificate_error`.

use std::io;

use rustls::{CertificateError, Error};

/// Returns what is wrong with a certificate, of either side.
pub(super) fn describe_certificate_error(wrong: &CertificateError) -> String {
    match wrong {
        CertificateError::BadEncoding => "it cannot be read: it is damaged, or no certificate".into(),
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "it has expired: renew it".into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet: look at the clocks".into()
        }
        CertificateError::Revoked => "its authority has revoked it".into(),
        CertificateError::UnhandledCriticalExtension => {
            "it has a critical extension that is not known here: make it anew without that".into()
        }
        CertificateError::UnknownIssuer => "no authority that is trusted here has issued it".into(),
        CertificateError::BadSignature => {
            "another authority of the same name than the one that is trusted has signed it: was the authority made anew?"
                .into()
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "it is signed in a way that is not taken here, such as with SHA-1: make it anew, with P-256 or RSA and SHA-256"
                .into()
        }
        // The type of this case is private to the library; its text is the name of the case.
        CertificateError::Other(case) => describe_rare_certificate_error(&case.to_string()),
        other => split_camel_case(&format!("{other:?}")),
    }
}

/// Returns the message for a rare certificate error, by its name in the library.
fn describe_rare_certificate_error(case: &str) -> String {
    let words = match case {
        "CaUsedAsEndEntity" => {
            "it is the certificate of an authority, as one that signed itself mostly is, and no authority may show its own \
             here: let it sign a certificate for this holder (`muster tls new` makes both)"
        }
        "EndEntityUsedAsCa" => {
            "what signed it is no authority: its issuer's certificate lacks the basic constraint CA"
        }
        "PathLenConstraintViolated" => {
            "there are more authorities between it and the trusted one than that one allows (path length)"
        }
        "NameConstraintViolation" => "its authority may not sign for such a name (name constraints)",
        "UnsupportedCertVersion" => "it is not of X.509 version 3: make it anew",
        "EmptyEkuExtension" => "its extended key usage names no use at all: make it anew",
        "UnsupportedCriticalExtension" => {
            "it has a critical extension that is not known here: make it anew without that"
        }
        _ => return split_camel_case(case),
    };
    words.into()
}

/// Splits the name of a case, such as `NoCipherSuitesInCommon`, into words, without its contents.
pub(super) fn split_camel_case(case: &str) -> String {
    let name = case.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    let mut words = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(letter.to_ascii_lowercase());
    }
    words
}

/// Returns why a server could not be dialled, for the person who dialled it.
#[must_use]
pub fn describe_dial_error(error: &io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ))
        | None => error.to_string(),
        Some(Error::InvalidCertificate(wrong)) => {
            format!("the server's certificate is refused: {}", describe_certificate_error(wrong))
        }
        Some(Error::PeerIncompatible(wrong)) => {
            format!("the two have nothing in common: {}", split_camel_case(&format!("{wrong:?}")))
        }
        Some(Error::AlertReceived(alert)) => {
            format!("the server refuses the handshake: {}", split_camel_case(&format!("{alert:?}")))
        }
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cases_become_words() {
        assert_eq!(split_camel_case("NoCipherSuitesInCommon"), "no cipher suites in common");
        assert_eq!(
            split_camel_case("UnsupportedSignatureAlgorithmContext { id: [1, 2] }"),
            "unsupported signature algorithm context"
        );
        assert!(
            describe_rare_certificate_error("CaUsedAsEndEntity")
                .starts_with("it is the certificate of an authority")
        );
        assert_eq!(
            describe_rare_certificate_error("MaximumPathDepthExceeded"),
            "maximum path depth exceeded"
        );
        let certificate = describe_certificate_error(&CertificateError::ApplicationVerificationFailure);
        assert_eq!(certificate, "application verification failure");
    }
}
