// The binary interface 1, for a machine with pointers of 8 bytes. What is written here never changes within the version: fields
// may follow at the end of the structs of options, and nothing else may differ.
#include <stddef.h>

#include "muster.h"

#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)
#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)

_Static_assert(MUSTER_ABI_VERSION == 1, "another version: write its layout here");
_Static_assert(sizeof(void *) == 8, "the layout of another machine is not written here");

SIZE(muster_status, 4);
SIZE(muster_identity, 24);
AT(muster_identity, tasks, 4);
AT(muster_identity, incarnation, 8);
AT(muster_identity, run, 16);
SIZE(muster_member, 16);
AT(muster_member, incarnation, 8);
SIZE(muster_members, 16);
AT(muster_members, len, 8);
SIZE(muster_bytes, 16);
AT(muster_bytes, len, 8);
SIZE(muster_entry, 24);
AT(muster_entry, value, 8);
AT(muster_entry, len, 16);
SIZE(muster_entries, 16);
AT(muster_entries, len, 8);
SIZE(muster_transfer_spec, 56);
AT(muster_transfer_spec, from, 4);
AT(muster_transfer_spec, to, 8);
AT(muster_transfer_spec, key, 16);
AT(muster_transfer_spec, buffer, 24);
AT(muster_transfer_spec, offset, 32);
AT(muster_transfer_spec, len, 40);
AT(muster_transfer_spec, layout, 48);
SIZE(muster_transfer_stats, 24);
AT(muster_transfer_stats, received, 8);
AT(muster_transfer_stats, elapsed_us, 16);

AT(muster_join_options, size, 0);
AT(muster_join_options, service, 8);
AT(muster_join_options, job, 16);
AT(muster_join_options, task, 24);
AT(muster_join_options, tasks, 32);
AT(muster_join_options, heartbeat_timeout_ms, 40);
AT(muster_join_options, ca, 48);
AT(muster_join_options, cert, 56);
AT(muster_join_options, key, 64);
AT(muster_join_options, devices, 72);
AT(muster_join_options, transport, 76);
AT(muster_join_options, listen, 80);
AT(muster_join_options, advertise, 88);
AT(muster_join_options, token, 96);
AT(muster_join_options, token_len, 104);
AT(muster_join_options, transfer_cert, 112);
AT(muster_join_options, transfer_key, 120);
AT(muster_join_options, transfer_ca, 128);
AT(muster_join_options, insecure_transfers, 136);
AT(muster_launch_options, size, 0);
AT(muster_launch_options, channel, 8);
AT(muster_launch_options, priority, 12);
AT(muster_launch_options, deadline_ms, 16);
AT(muster_launch_options, stall_ms, 24);

_Static_assert(MUSTER_STATUS_OK == 0 && MUSTER_STATUS_OTHER == 7, "statuses of calls");
_Static_assert(MUSTER_STATUS_CLUSTER_ENV == 100 && MUSTER_STATUS_NO_ENGINE == 114, "statuses of agents");
_Static_assert(MUSTER_STATUS_PEER_DEAD == 200 && MUSTER_STATUS_CLOSED == 212, "statuses of transfers");
_Static_assert(MUSTER_STATUS_EMPTY == 300 && MUSTER_STATUS_UNEVEN == 310, "statuses of requests");
_Static_assert(MUSTER_STATUS_FULL == 400 && MUSTER_STATUS_SYSTEM == 402, "statuses of memory");
