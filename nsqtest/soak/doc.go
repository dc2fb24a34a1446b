// Package soak has no code of its own. Its tests run several consumers, some of them processes of their own, against three real
// nsqds while everything around them fails at random, and keep a ledger of every message:
//
//	go test ./soak                                           # 100 000 messages, 20 000 under the race detector
//	go test ./soak -args -soak.messages=1000000              # so many
//	go test ./soak -v -run TestSoak -timeout 1h -args -soak=30m  # for half an hour, with a look at memory each minute
//	go test ./soak -args -soak.seed=42                       # the plan of faults of the run that printed this seed
//
// In the end every message that an nsqd has confirmed was handled; each that was handled more than once has a cause that the ledger
// knows (its timeout, a requeue, a lost connection, a killed consumer); max-in-flight was never exceeded, as seen at the
// consumers' sockets; and nothing of a stopped consumer is left.
//
// # What NSQ itself loses
//
// An nsqd that is killed loses what it holds in memory, and an nsqd that ends in order can lose a message that one of its
// goroutines has in its hands at that moment, as it doesn't wait for them. No consumer can change that. So numbers may be missing in
// two cases: for an nsqd that was killed, those that it had accepted and had no FIN for when it died; for an nsqd that was
// restarted in order, a few that it had accepted before, has forgotten, and no consumer sent a FIN for. No FIN means none at the
// consumers' sockets, where every byte is seen.
package soak
