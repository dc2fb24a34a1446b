module github.com/rdyloop/nsq/bench

go 1.25.0

require (
	github.com/golang/snappy v1.0.0
	github.com/nsqio/go-nsq v1.1.0
	github.com/nsqio/nsq v1.3.0
	github.com/rdyloop/nsq v0.0.0
	github.com/rdyloop/nsq/nsqtest v0.0.0
	github.com/stretchr/testify v1.12.1
)

require (
	github.com/bitly/go-simplejson v0.5.1 // indirect
	github.com/blang/semver v3.5.1+incompatible // indirect
	github.com/bmizerany/perks v0.0.0-20141205001514-d9a9656a3a4b // indirect
	github.com/julienschmidt/httprouter v1.3.0 // indirect
	github.com/nsqio/go-diskqueue v1.1.0 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
)

replace (
	github.com/rdyloop/nsq => ../
	github.com/rdyloop/nsq/nsqtest => ../nsqtest
)
