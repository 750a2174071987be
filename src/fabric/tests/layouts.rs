//! Compares the structs of `layouts.rs` with the headers of libfabric.

use std::mem::offset_of;
use std::process::Command;

use crate::skip::{Lacking, skip};

#[path = "../layouts.rs"]
#[allow(dead_code, unreachable_pub, reason = "only offsets and numbers are used")]
mod fi;

/// Each line: an expression of C, and what it is here.
fn expected() -> Vec<(&'static str, usize)> {
    let mut all = Vec::new();
    macro_rules! fields {
        ($c:literal, $rust:ty: $($c_field:ident = $field:ident),* $(,)?) => {
            $(all.push((concat!("offsetof(struct ", $c, ", ", stringify!($c_field), ")"), offset_of!($rust, $field)));)*
        };
    }
    fields!("fid", fi::Fid: fclass = class, context = context, ops = ops);
    fields!("fi_ops", fi::FidOps: close = close, bind = bind, control = control);
    fields!("fi_ep_attr", fi::EndpointAttributes: type = kind, max_msg_size = max_msg_size);
    fields!("fi_domain_attr", fi::DomainAttributes: name = name, threading = threading, mr_mode = mr_mode,
        mr_key_size = mr_key_size);
    fields!("fi_fabric_attr", fi::FabricAttributes: name = name, prov_name = prov_name);
    fields!("fi_tx_attr", fi::TransmitAttributes: size = size, rma_iov_limit = rma_iov_limit);
    fields!("fi_info", fi::Info: next = next, caps = caps, mode = mode, src_addrlen = src_addrlen, tx_attr = tx_attr,
        ep_attr = ep_attr, domain_attr = domain_attr, fabric_attr = fabric_attr, nic = nic);
    fields!("fid_fabric", fi::FabricFid: ops = ops);
    fields!("fi_ops_fabric", fi::FabricOps: domain = domain);
    fields!("fid_domain", fi::DomainFid: ops = ops, mr = mr);
    fields!("fi_ops_domain", fi::DomainOps: av_open = av_open, cq_open = cq_open, endpoint = endpoint);
    fields!("fi_ops_mr", fi::MemoryOps: reg = reg);
    fields!("fid_mr", fi::MemoryFid: mem_desc = mem_desc, key = key);
    fields!("fi_av_attr", fi::AddressAttributes: type = kind, count = count, flags = flags);
    fields!("fid_av", fi::AddressFid: ops = ops);
    fields!("fi_ops_av", fi::AddressOps: insert = insert);
    fields!("fi_cq_attr", fi::QueueAttributes: size = size, format = format, wait_obj = wait_obj, wait_set = wait_set);
    fields!("fid_cq", fi::QueueFid: ops = ops);
    fields!("fi_ops_cq", fi::QueueOps: read = read, readerr = readerr);
    fields!("fi_cq_entry", fi::QueueEntry: op_context = op_context);
    fields!("fi_cq_err_entry", fi::QueueError: op_context = op_context, err = err, err_data_size = err_data_size);
    fields!("fid_ep", fi::EndpointFid: cm = cm, rma = rma);
    fields!("fi_ops_cm", fi::ConnectionOps: getname = getname);
    fields!("fi_ops_rma", fi::RemoteMemoryOps: read = read);
    all.extend([
        ("sizeof(struct fi_av_attr)", size_of::<fi::AddressAttributes>()),
        ("sizeof(struct fi_cq_attr)", size_of::<fi::QueueAttributes>()),
        ("sizeof(struct fi_cq_entry)", size_of::<fi::QueueEntry>()),
        ("FI_RMA", fi::CAP_RMA as usize),
        ("FI_READ", fi::CAP_READ as usize),
        ("FI_REMOTE_READ", fi::CAP_REMOTE_READ as usize),
        ("FI_CONTEXT", fi::MODE_CONTEXT as usize),
        ("FI_CONTEXT2", fi::MODE_CONTEXT2 as usize),
        ("FI_MR_LOCAL", fi::MR_LOCAL as usize),
        ("FI_MR_VIRT_ADDR", fi::MR_VIRT_ADDR as usize),
        ("FI_MR_ALLOCATED", fi::MR_ALLOCATED as usize),
        ("FI_MR_PROV_KEY", fi::MR_PROV_KEY as usize),
        ("FI_EP_RDM", fi::ENDPOINT_RDM as usize),
        ("FI_THREAD_SAFE", fi::THREAD_SAFE as usize),
        ("FI_CQ_FORMAT_CONTEXT", fi::CQ_FORMAT_CONTEXT as usize),
        ("FI_WAIT_NONE", fi::WAIT_NONE as usize),
        ("FI_ADDR_STR", fi::ADDRESS_TEXT as usize),
        ("FI_TRANSMIT", fi::BIND_TRANSMIT as usize),
        ("FI_RECV", fi::BIND_RECV as usize),
        ("FI_ENABLE", fi::COMMAND_ENABLE as usize),
        ("FI_EAGAIN", fi::EAGAIN as usize),
        ("FI_EAVAIL", fi::EAVAIL as usize),
        ("FI_VERSION(1, 9)", fi::API_VERSION as usize),
    ]);
    all
}

#[test]
fn structs_and_numbers_are_those_of_the_headers() {
    let folder = std::env::temp_dir().join(format!("fabric-layouts-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (source, program) = (folder.join("layouts.c"), folder.join("layouts"));
    let expected = expected();
    let lines: String = expected
        .iter()
        .map(|(it, _)| format!("printf(\"%llu\\n\", (unsigned long long)({it}));\n"))
        .collect();
    let headers = ["fabric", "fi_domain", "fi_endpoint", "fi_cm", "fi_rma", "fi_eq", "fi_errno"];
    let includes: String = headers.iter().map(|name| format!("#include <rdma/{name}.h>\n")).collect();
    std::fs::write(
        &source,
        format!(
            "#include <stddef.h>\n#include <stdio.h>\n{includes}int main(void) {{\n{lines}return 0;\n}}\n"
        ),
    )
    .unwrap();
    let compiled = Command::new("cc").arg(&source).arg("-o").arg(&program).output();
    let is_compiled = compiled.as_ref().is_ok_and(|output| output.status.success());
    let said = is_compiled.then(|| Command::new(&program).output().unwrap());
    std::fs::remove_dir_all(&folder).unwrap();
    let Some(said) = said else {
        return skip(Lacking::Installation("the headers of libfabric (Debian: libfabric-dev)"));
    };
    let said = String::from_utf8(said.stdout).unwrap();
    let found: Vec<usize> = said.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(found.len(), expected.len());
    for ((it, wanted), found) in expected.iter().zip(found) {
        assert_eq!(found, *wanted, "{it}");
    }
}
